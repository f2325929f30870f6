-- Removes and returns the rows of pods with these uids. The writer adds the newest row of each pod again, because an
-- update in place costs twice as much. {table}: pod or pod_seen.
DELETE FROM {table} WHERE uid IN (SELECT unnest(?)) RETURNING *
