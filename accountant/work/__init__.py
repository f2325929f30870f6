"""Jobs: from waiting through progress to their end, and what they cost."""
