-- Pods whose CLUSTER/NAMESPACE/NAME has $text, in lower case, and whose job, as one of their sources names it, has not in
-- its path: the others are found by their job.
SELECT cluster, uid FROM (FROM pod UNION ALL FROM pod_seen)
WHERE contains(lower(concat_ws('/', cluster, namespace, name)), $text)
  AND NOT contains(lower(concat_ws('/', cluster, namespace, coalesce(nullif(workload, ''), 'Pod/' || name))), $text)
