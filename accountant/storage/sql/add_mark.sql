-- Adds marks. A few short lists as parameters cost a third of a registered table.
INSERT INTO mark SELECT unnest($streams), unnest($seqs)
