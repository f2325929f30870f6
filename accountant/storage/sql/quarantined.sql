-- Quarantined records, newest first.
SELECT s.cluster, s.node, s.epoch, q.seq, q.received_ms, q.reason, q.detail, q.content
FROM quarantine q JOIN stream s ON s.id = q.stream
ORDER BY q.received_ms DESC, s.cluster, s.node, s.epoch, q.seq DESC
LIMIT $limit
