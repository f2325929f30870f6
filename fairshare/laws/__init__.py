"""Computes queue weights from usage history.

Read in this order: `weight_calculation`, the whole tree of queues; `feedback_law`, the weights of siblings;
`weight_bounds`, how far they may go; `division`, what a scheduler makes of them; `gang_turns`, gangs that no weight
admits."""
