-- The newest observation wins; between equal ones the greater text, so that order never decides.
MERGE INTO pod_seen USING incoming i ON pod_seen.cluster = i.cluster AND pod_seen.uid = i.uid
WHEN MATCHED AND (i.observed_ms, i.content) > (pod_seen.observed_ms, pod_seen.content)
  THEN UPDATE SET namespace = i.namespace, name = i.name, workload = i.workload, queue_ref = i.queue_ref,
                  observed_ms = i.observed_ms, content = i.content
WHEN NOT MATCHED THEN INSERT VALUES (i.cluster, i.uid, i.namespace, i.name, i.workload, i.queue_ref, i.observed_ms, i.content)
