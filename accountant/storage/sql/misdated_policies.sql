-- Policies that come into force after $limit.
SELECT count(*), coalesce(min(effective_ms), 0), coalesce(max(effective_ms), 0), coalesce(list(DISTINCT version), [])
FROM policy WHERE effective_ms > $limit
