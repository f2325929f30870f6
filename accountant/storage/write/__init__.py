"""Turns batches from agents into stored rows: detects duplicates, quarantines invalid rows and resolves overlaps."""
