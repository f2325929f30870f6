-- The hours in which records that end after $limit begin or end.
SELECT DISTINCT hour_ms FROM (
    SELECT start_ms - start_ms % 3600000 AS hour_ms FROM received WHERE end_ms > $limit
    UNION ALL
    SELECT (end_ms - 1) - (end_ms - 1) % 3600000 FROM received WHERE end_ms > $limit
)
