-- Ends at $now the assignments of nodes and namespaces that last beyond $limit, and the life of GPUs that retire after
-- it. Dates parts of the archive from after $limit to $now, because later parts are found by time.
UPDATE past SET until_ms = $now WHERE until_ms > $limit;
UPDATE retired SET at_ms = $now WHERE at_ms > $limit;
UPDATE archive_part SET at_ms = $now WHERE at_ms > $limit
