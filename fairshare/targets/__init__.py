"""What the controller knows of any scheduler: the protocol of its plug-in, the plan of writes, the status ConfigMap."""
