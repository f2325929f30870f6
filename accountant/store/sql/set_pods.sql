-- The newest observation wins; between equal ones the greater text, so that order never decides.
MERGE INTO pod USING incoming i ON pod.cluster = i.cluster AND pod.uid = i.uid
WHEN MATCHED AND (i.observed_ms, i.content) > (pod.observed_ms, pod.content)
  THEN UPDATE SET namespace = i.namespace, name = i.name, workload = i.workload, queue_ref = i.queue_ref,
                  observed_ms = i.observed_ms, content = i.content
WHEN NOT MATCHED THEN INSERT VALUES (i.cluster, i.uid, i.namespace, i.name, i.workload, i.queue_ref, i.observed_ms, i.content)
