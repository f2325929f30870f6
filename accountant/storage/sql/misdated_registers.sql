-- Earlier facts of nodes and namespaces that are valid beyond $limit, and GPUs that retire after it.
SELECT count(*), coalesce(min(at_ms), 0), coalesce(max(at_ms), 0), coalesce(list(DISTINCT name), [])
FROM (
    SELECT until_ms AS at_ms, kind || ' ' || cluster || '/' || name AS name FROM past
    UNION ALL
    SELECT r.at_ms, 'retired ' || g.gpu_uuid FROM retired r JOIN gpu g ON g.id = r.gpu
) WHERE at_ms > $limit
