-- What nodes and namespaces were until after $limit ends at $now, and so does the life of GPUs that are retired from then on.
UPDATE past SET until_ms = $now WHERE until_ms > $limit;
UPDATE retired SET at_ms = $now WHERE at_ms > $limit
