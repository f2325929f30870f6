-- One row per outbox and per GPU and node.
CREATE OR REPLACE TEMP TABLE compacted AS SELECT stream, max(durable_seq) FROM mark GROUP BY ALL ORDER BY ALL;
DELETE FROM mark;
INSERT INTO mark FROM compacted;
CREATE OR REPLACE TEMP TABLE compacted AS SELECT gpu, node, min(first_ms), max(last_ms) FROM tenure GROUP BY ALL ORDER BY ALL;
DELETE FROM tenure;
INSERT INTO tenure FROM compacted;
DROP TABLE compacted;
