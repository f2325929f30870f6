-- Removes the sums of whole days. incoming: at_ms, the starts of the days.
DELETE FROM day WHERE at_ms IN (SELECT at_ms FROM incoming);
DELETE FROM kept_day WHERE start_ms IN (SELECT at_ms FROM incoming)
