-- Moves records that end after $limit into quarantine. Removes tenures that begin after $limit, and ends at $now those
-- that end after it.
INSERT INTO quarantine
SELECT stream, seq, digest, $now, 'future-dated', 'ends ' || (end_ms - $now) || ' ms after it was found', CAST(to_json(r) AS VARCHAR)
FROM received r WHERE end_ms > $limit;
DELETE FROM piece WHERE (stream, seq) IN (SELECT (stream, seq) FROM received WHERE end_ms > $limit);
DELETE FROM received WHERE end_ms > $limit;
DELETE FROM tenure WHERE first_ms > $limit;
UPDATE tenure SET last_ms = $now WHERE last_ms > $limit
