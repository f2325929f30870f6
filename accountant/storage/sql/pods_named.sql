-- Pods that may belong to some jobs or have some names: their workload is in $jobs, or their name in $names.
SELECT cluster, uid FROM pod WHERE list_contains($jobs, workload) OR list_contains($names, name)
UNION
SELECT cluster, uid FROM pod_seen WHERE list_contains($jobs, workload) OR list_contains($names, name)
