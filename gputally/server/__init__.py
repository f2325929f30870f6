"""Holds what both HTTP servers share: settings, authentication, permissions, limits, page layout and TLS."""
