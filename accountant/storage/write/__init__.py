"""Turns batches from agents into stored rows: finds duplicates, quarantines bad rows and splits them by owner."""
