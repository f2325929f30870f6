-- The rows of an import count no more. They stay where they are, because the archive has them, and no overlap is resolved
-- with them. $cluster, $prefix: of the import's outboxes.
CREATE OR REPLACE TEMP TABLE withdrawn AS
SELECT r.stream, r.seq, r.set_seq, r.gpu, s.node, r.holder, r.start_ms, r.end_ms, r.capacity_us, r.booked
FROM received r JOIN stream s ON s.id = r.stream
WHERE s.cluster = $cluster AND starts_with(s.epoch, $prefix) AND r.method != 'withdrawn'
  AND r.start_ms >= $start AND r.end_ms <= $end;
UPDATE received SET booked = false, method = 'withdrawn'
WHERE start_ms >= $start AND end_ms <= $end AND (stream, seq) IN (SELECT (stream, seq) FROM withdrawn);
DELETE FROM piece
WHERE start_ms >= $start AND end_ms <= $end AND (stream, set_seq) IN (SELECT (stream, set_seq) FROM withdrawn)
