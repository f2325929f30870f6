-- The decisions among these that are already stored, with a time from $low to $high. The same id at another instant is
-- another decision.
SELECT id FROM decision WHERE at_ms BETWEEN $low AND $high AND id IN (SELECT unnest($ids))
