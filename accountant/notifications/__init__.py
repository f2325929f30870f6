"""Delivers reports and notices automatically: as files, by mail, in a chat.

`subscriptions` reads what the operator wants and records delivery attempts, `triggers` decides what is due, `messages`
composes the text for each medium, `channels` sends it, `dispatcher` combines these. A message is not sent twice
automatically: an attempt with an unknown outcome is shown to a person instead of being repeated."""
