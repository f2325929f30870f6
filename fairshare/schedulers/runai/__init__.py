"""Over-quota weights of Run:ai's projects and departments."""
