-- Decisions of before $before, at most $most, of those up to the number $archived where that is not null.
DELETE FROM decision WHERE number IN (
    SELECT number FROM decision
    WHERE at_ms < $before AND ($archived IS NULL OR number <= $archived)
    ORDER BY number LIMIT $most
) AND at_ms < $before
