SELECT s.cluster, s.node, s.epoch, m.durable_seq FROM mark m JOIN stream s ON s.id = m.stream
