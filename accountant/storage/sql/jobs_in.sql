-- The workloads of the pods of a namespace; a pod without one is its own.
SELECT DISTINCT coalesce(nullif(workload, ''), 'Pod/' || name)
FROM (FROM pod UNION ALL FROM pod_seen) WHERE cluster = $cluster AND namespace = $namespace
