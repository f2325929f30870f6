-- Pods that may be of some jobs, or bear some names: their workload is one of $jobs, or their name one of $names.
SELECT cluster, uid FROM pod WHERE list_contains($jobs, workload) OR list_contains($names, name)
UNION
SELECT cluster, uid FROM pod_seen WHERE list_contains($jobs, workload) OR list_contains($names, name)
