-- Removes the rows of these uids from {table}; the newest one is added again as a new row. An update in place would
-- cost twice as much, most of it for the text.
DELETE FROM {table} WHERE uid IN (SELECT unnest(?)) RETURNING *
