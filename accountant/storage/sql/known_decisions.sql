-- Which of these decisions there are, among those dated from $low to $high: the same id at another instant is another.
SELECT id FROM decision WHERE at_ms BETWEEN $low AND $high AND id IN (SELECT unnest($ids))
