"""What other programs ask for in their own tongue, answered from the ledger.

Each is served on a port of its own, off by default: these clients send no credentials, so the operator
decides by a NetworkPolicy who reaches the port.
"""
