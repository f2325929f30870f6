"""How history becomes weights: one law's signature, siblings and tree, turns, bounds and pace. Pure."""
