-- One row per outbox and, as `compact_tenures` made them, per GPU and node.
DELETE FROM tenure;
INSERT INTO tenure FROM compacted;
CREATE OR REPLACE TEMP TABLE compacted AS SELECT stream, max(durable_seq) FROM mark GROUP BY ALL ORDER BY ALL;
DELETE FROM mark;
INSERT INTO mark FROM compacted;
DROP TABLE compacted
