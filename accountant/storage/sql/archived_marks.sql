-- The highest archived number of each outbox.
SELECT s.cluster, s.node, s.epoch, a.seq FROM archive_mark a JOIN stream s ON s.id = a.stream
