-- Removes decisions dated before $before, at most $most, and none with a number above $archived unless that is null.
DELETE FROM decision WHERE number IN (
    SELECT number FROM decision
    WHERE at_ms < $before AND ($archived IS NULL OR number <= $archived)
    ORDER BY number LIMIT $most
) AND at_ms < $before
