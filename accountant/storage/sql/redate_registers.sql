-- Ends at $now the validity of earlier facts of nodes and namespaces and the life of GPUs, if it ends after $limit. Dates
-- parts of the archive from after $limit to $now, because later parts are found by time.
UPDATE past SET until_ms = $now WHERE until_ms > $limit;
UPDATE retired SET at_ms = $now WHERE at_ms > $limit;
UPDATE archive_part SET at_ms = $now WHERE at_ms > $limit
