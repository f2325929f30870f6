"""Stores closed rows on the node's disk and uploads them until the accountant has stored them."""
