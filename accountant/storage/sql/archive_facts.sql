-- The numbers of the pod facts above the archive's marks. archive_pods.sql has their content.
SELECT s.cluster, s.node, s.epoch, f.seq, f.digest
FROM pod_fact f JOIN stream s ON s.id = f.stream LEFT JOIN archive_mark a ON a.stream = f.stream
WHERE f.seq > coalesce(a.seq, 0)
ORDER BY ALL
