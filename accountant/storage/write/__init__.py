"""Turns batches from agents into stored rows.

Read in this order: `batch_admission` sorts out duplicates and invalid rows; `record_columns.cells` splits the time of
the others into accounts; `interval_writer` writes them and settles which of overlapping ones count (`settle`); at a
later checkpoint `rollups` folds full hours into sums, by which questions are answered."""
