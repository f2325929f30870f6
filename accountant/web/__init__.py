"""Serves the accountant's HTML pages. They need no scripts and can be printed; Explore has one to zoom by dragging."""
