"""Answers questions from the stored rows and sums: one module for each question, with its SQL beside it.

`usage_query.usage` is the relation of usage: sums by class of holder (`usage_sums`), start-up and lent time
(`startup_and_lent_time`), and time that nobody metered. `window_query.Windows` is a queue's usage in a window, from
sums that it keeps between questions."""
