-- Sums of whole local days, which make queries over a month fast. Checkpoints fill them (accountant.storage.write.rollups).

-- The same columns as `hour`. at_ms is the start of the day.
CREATE TABLE day AS FROM hour LIMIT 0;
-- The days that have sums: spans of whole quarter-hours that do not overlap, even if the time zone was changed.
CREATE TABLE kept_day (start_ms BIGINT NOT NULL, end_ms BIGINT NOT NULL);
