-- The stored items dated after $limit, by kind: their number, the first and the last date, and their names. Records count
-- by their end. Registers are earlier facts of nodes and namespaces that are valid beyond $limit, and GPUs that retire
-- after it.
SELECT kind, count(*), min(at_ms), max(at_ms), list(DISTINCT name)
FROM (
    SELECT 'records' AS kind, r.end_ms AS at_ms, s.cluster || '/' || s.node AS name
    FROM received r JOIN stream s ON s.id = r.stream
    UNION ALL
    SELECT 'policies', effective_ms, version FROM policy
    UNION ALL
    SELECT 'pods', observed_ms, namespace || '/' || name FROM (FROM pod UNION ALL FROM pod_seen)
    UNION ALL
    SELECT 'decisions', greatest(at_ms, received_ms), id FROM decision
    UNION ALL
    SELECT 'registers', until_ms, kind || ' ' || cluster || '/' || name FROM past
    UNION ALL
    SELECT 'registers', r.at_ms, 'retired ' || g.gpu_uuid FROM retired r JOIN gpu g ON g.id = r.gpu
    UNION ALL
    SELECT 'acts', at_ms, number || ' ' || kind || ' ' || subject FROM act
)
WHERE at_ms > $limit
GROUP BY kind
