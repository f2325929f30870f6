"""The schedulers that gputally brings: a folder for each, which holds all that the controller knows about it.

Read `gputally.kubernetes.scheduler_plugins` and `fairshare.targets.weight_plan` first. The module `plugin` of a folder
has the manifest, and `adapter` reads and writes the scheduler's objects. A scheduler of another package is registered
in the same way (docs/plugins/scheduler.md)."""
