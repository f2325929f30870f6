-- Missing sequence numbers above the archive's marks.
SELECT s.cluster, s.node, s.epoch, h.first_seq, h.last_seq, h.reason
FROM hole h JOIN stream s ON s.id = h.stream LEFT JOIN archive_mark a ON a.stream = h.stream
WHERE h.last_seq > coalesce(a.seq, 0)
ORDER BY ALL
