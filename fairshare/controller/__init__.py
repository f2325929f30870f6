"""Runs the control loop, and all that only a running controller needs: its writes, its metrics, and the extender that
the default kube-scheduler asks.

`laws` computes weights; this package decides when, and writes them. `control_loop` is the order of a cycle,
`cycle_report` its result, `weight_writer` its writes."""
