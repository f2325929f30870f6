-- Decisions dated after $limit.
SELECT count(*), coalesce(min(greatest(at_ms, received_ms)), 0), coalesce(max(greatest(at_ms, received_ms)), 0), coalesce(list(DISTINCT id), [])
FROM decision WHERE greatest(at_ms, received_ms) > $limit
