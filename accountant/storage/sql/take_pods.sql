-- Out of {table}, the rows of these uids; the newest comes back as a row that is added. In place it would cost twice as
-- much, most of it for the text.
DELETE FROM {table} WHERE uid IN (SELECT unnest(?)) RETURNING *
