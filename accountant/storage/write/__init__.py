"""Turns batches from agents into stored rows.

Read in this order: `batch_admission` sorts out duplicates, invalid rows and overlaps; `interval_writer` writes the
rest; at a later checkpoint `rollups` folds full hours into sums, by which questions are answered."""
