"""Delivers reports and notices without being asked: as files, by mail, in a chat.

`subscriptions` holds what an operator wants, `triggers` what is due, `messages` the text for each medium, `channels`
how it is sent, `delivery_attempts` the outcome. Nothing is sent twice: an attempt with an unknown outcome is shown to a
person and not repeated.
"""
