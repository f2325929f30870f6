-- Records that end after $limit.
SELECT count(*), coalesce(min(r.end_ms), 0), coalesce(max(r.end_ms), 0), coalesce(list(DISTINCT s.cluster || '/' || s.node), [])
FROM received r JOIN stream s ON s.id = r.stream WHERE r.end_ms > $limit
