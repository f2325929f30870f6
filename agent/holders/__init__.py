"""Finds the holder of each device, and the facts of the pods among the holders.

`node_reader.NodeSource` is what the agent asks: it merges what the chosen sources say into one snapshot of the node.
`protocol` says what a source brings; a module or folder stands for each source and each way to share GPUs, and `guard`
lets none of another package stop the agent."""
