"""Finds the holder of each device, and the facts of the pods among the holders.

The agent asks `agent.node_reader.NodeSource`, which joins what the chosen sources say with the readings of the GPUs.
`protocol` says what a source brings; a module or folder stands for each source and each way to share GPUs, and `guard`
lets none of another package stop the agent."""
