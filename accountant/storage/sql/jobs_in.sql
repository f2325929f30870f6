-- The workloads of the pods of a namespace. A pod without a workload counts as a workload of its own.
SELECT DISTINCT coalesce(nullif(workload, ''), 'Pod/' || name)
FROM (FROM pod UNION ALL FROM pod_seen) WHERE cluster = $cluster AND namespace = $namespace
