-- The highest committed number of each outbox.
SELECT s.cluster, s.node, s.epoch, max(m.durable_seq) FROM mark m JOIN stream s ON s.id = m.stream GROUP BY ALL
