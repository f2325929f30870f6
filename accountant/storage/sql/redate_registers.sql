-- What nodes and namespaces were until after $limit ends at $now, and so does the life of GPUs that are retired from then on.
-- Parts of the archive from after $limit are as of $now: what comes after them is told by their time.
UPDATE past SET until_ms = $now WHERE until_ms > $limit;
UPDATE retired SET at_ms = $now WHERE at_ms > $limit;
UPDATE archive_part SET at_ms = $now WHERE at_ms > $limit
