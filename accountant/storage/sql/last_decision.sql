-- The highest number of a decision, here or in the archive.
SELECT greatest(
    (SELECT coalesce(max(number), 0) FROM decision),
    (SELECT coalesce(max(number), 0) FROM archive_register WHERE name = 'decision')
)
