-- Quarantined records above the archive's marks. A record that contradicts an older one has the number of the older
-- one, so such records are found by the time at which they arrived.
SELECT s.cluster, s.node, s.epoch, q.seq, q.digest, q.received_ms, q.reason, q.detail, q.content
FROM quarantine q JOIN stream s ON s.id = q.stream LEFT JOIN archive_mark a ON a.stream = q.stream
WHERE q.seq > coalesce(a.seq, 0) OR q.received_ms >= (SELECT coalesce(max(at_ms), 0) FROM archive_part)
ORDER BY ALL
