"""The schedulers that gputally brings: a folder for each, which holds all that the controller knows about it.

Read `gputally.kubernetes.scheduler_plugins` and `fairshare.targets.weight_plan` first. The module `plugin` of a folder
has the manifest, `section` is what a policy says of the scheduler, and `adapter` reads the scheduler's objects and says
which field carries the weight; the controller writes it. `conditions` explains the reasons that the adapter gives, and
`stop` ends a workload through its own object. A scheduler of another package is registered in the same way
(docs/plugins/scheduler.md)."""
