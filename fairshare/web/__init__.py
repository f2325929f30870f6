"""The controller's pages: who is due what, what was decided and why, and the policy as a form with a preview.

Rendered here from the last cycle and the accountant's answers; readable without scripts. What they must not do: hold up
a cycle, or write anything but the policy, where the operator named a place for it.
"""
