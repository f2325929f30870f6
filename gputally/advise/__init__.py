"""Implements `gputally advise`: how many nodes are needed, what could run on spot capacity, what could share a GPU.

The figures come from the accountant's HTTP API. Pure modules compute each piece of advice and state what it is based on
and what is unknown. Nothing is changed."""
