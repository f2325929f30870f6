"""The books: who pays what for which time, statements that close, and what corrects them."""
