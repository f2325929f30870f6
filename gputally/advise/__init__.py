"""Implements `gputally advise`, which tells how many nodes are needed, and which jobs could run on spot capacity or
share a GPU.

The figures come from the accountant's HTTP API. Each recommendation states its assumptions and what is unknown. The
command changes nothing."""
