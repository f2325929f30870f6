"""A node that is made up, and whose truth is known to the microsecond."""
