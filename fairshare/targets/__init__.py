"""What the controller knows of any scheduler: the protocol of its plug-in and the plan of writes (`weight_plan`), which
ones are installed, the guard around those of other packages, and the status ConfigMap."""
