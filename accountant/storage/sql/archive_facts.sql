-- Numbers of pod facts above the archive's marks; what they said is among the pods.
SELECT s.cluster, s.node, s.epoch, f.seq, f.digest
FROM pod_fact f JOIN stream s ON s.id = f.stream LEFT JOIN archive_mark a ON a.stream = f.stream
WHERE f.seq > coalesce(a.seq, 0)
ORDER BY ALL
