"""Serves the controller's pages: shares, decisions with their reasons, and the policy form with a preview.

The pages are rendered from the last cycle and the accountant's answers, and are readable without scripts. They never
delay a cycle, and write only the policy, if the operator has configured a place for it."""
