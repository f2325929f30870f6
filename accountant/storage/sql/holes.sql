-- Missing sequence numbers by node, newest first.
SELECT s.cluster, s.node, s.epoch, h.first_seq, h.last_seq, h.reason
FROM hole h JOIN stream s ON s.id = h.stream
ORDER BY s.cluster, s.node, s.epoch DESC, h.first_seq DESC
LIMIT $limit
