-- Replaces marks by one row per outbox, and tenures by the output of compact_tenures.sql.
DELETE FROM tenure;
INSERT INTO tenure FROM compacted;
CREATE OR REPLACE TEMP TABLE compacted AS SELECT stream, max(durable_seq) FROM mark GROUP BY ALL ORDER BY ALL;
DELETE FROM mark;
INSERT INTO mark FROM compacted;
DROP TABLE compacted
