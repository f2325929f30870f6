"""The fairshare controller: computes queue weights and preemptions from usage history.

Read in this order:

1. `controller.control_loop.Controller.cycle`: one cycle, from usage to written weights.
2. `usage.accountant_client.UsageReader`: the usage windows, or the reason why usage must change nothing.
3. `targets.weight_plan`: what the controller knows of any scheduler (`Adapter`), `look_at` and `plan`.
4. `laws.weight_calculation.calculate_weights`: weights from usage, pure.
5. `controller.weight_writer`: the only place that writes them.
6. `preemption.preemption_controller`: the same for workloads that must give GPUs back."""
