"""`gputally advise`: what the books suggest: how many nodes, what could run on spot capacity, what could share a GPU.

Figures come over the accountant's HTTP interface; every piece of advice is worked out by a pure module and says what it
rests on and what it does not know. Nothing is changed anywhere.
"""
