-- Pods whose workload is in $jobs or whose name is in $names.
SELECT cluster, uid FROM (FROM pod UNION ALL FROM pod_seen)
WHERE workload IN (SELECT unnest($jobs)) OR name IN (SELECT unnest($names))
