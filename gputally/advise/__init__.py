"""Implements `gputally advise`, which recommends node counts, jobs to run on spot capacity, and jobs that could share a
GPU.

The figures come from the accountant's HTTP API. Each recommendation states its assumptions and what is unknown. The
command changes nothing."""
