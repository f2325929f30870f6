-- Pods whose workload is in $jobs or whose name is in $names.
SELECT cluster, uid FROM pod WHERE list_contains($jobs, workload) OR list_contains($names, name)
UNION
SELECT cluster, uid FROM pod_seen WHERE list_contains($jobs, workload) OR list_contains($names, name)
