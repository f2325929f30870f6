"""Holds what both HTTP servers share: authentication, permissions, page layout and TLS."""
