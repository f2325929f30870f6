-- Acts recorded after $limit.
SELECT count(*), coalesce(min(at_ms), 0), coalesce(max(at_ms), 0), coalesce(list(DISTINCT number || ' ' || kind || ' ' || subject), [])
FROM act WHERE at_ms > $limit
