"""Decides which reports and notices are due, and has them delivered.

`subscriptions` reads what the operator wants and records delivery attempts, `triggers` decides what is due, `messages`
composes the text, `dispatcher` combines these and calls the channels (`accountant.channels`). A message is not sent
twice automatically: an attempt with an unknown outcome is shown to a person instead of being repeated."""
