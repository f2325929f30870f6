"""Runs the control loop, and all that only a running controller needs: its writes, its metrics, and what
schedulers see that ask it (`extender_views`).

`laws` computes weights; this package decides when, and writes them. `control_loop` is the order of a cycle,
`cycle_report` its result, `weight_writer` its writes."""
