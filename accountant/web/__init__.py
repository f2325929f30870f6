"""Serves the accountant's HTML pages. They need no scripts and can be printed; Explore has one to zoom by dragging.

Read in this order: `page_queries`, what pages ask through the cache of answers; `home` and `month_and_decision_pages`,
the first pages; `explore_table`, the question that Explore and the pages of groups ask; `explore_page`, how it is
shown."""
