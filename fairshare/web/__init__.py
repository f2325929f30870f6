"""Serves the controller's pages: shares, decisions with their reasons, and the policy form with a preview.

Rendered here from the last cycle and the accountant's answers; readable without scripts. What they must not do: hold up
a cycle, or write anything but the policy, where the operator named a place for it.
"""
