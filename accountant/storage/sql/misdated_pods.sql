-- Observations of pods dated after $limit.
SELECT count(*), coalesce(min(observed_ms), 0), coalesce(max(observed_ms), 0), coalesce(list(DISTINCT namespace || '/' || name), [])
FROM (FROM pod UNION ALL FROM pod_seen) WHERE observed_ms > $limit
