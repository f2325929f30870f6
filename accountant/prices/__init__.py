"""The price book: what an hour of a GPU costs, how that figure comes about, and who pays for what."""
