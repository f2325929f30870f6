-- Sums of whole local days, so that a month is as long as its days. Filled before checkpoints (accountant.storage.write.rollups).

-- As `hour`, by the start of the day.
CREATE TABLE day AS FROM hour LIMIT 0;
-- The days that have sums: spans of whole quarter-hours that never overlap, whatever the zone then was.
CREATE TABLE kept_day (start_ms BIGINT NOT NULL, end_ms BIGINT NOT NULL);
