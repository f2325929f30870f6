-- Into {table}, where its row is older as {newer} says; who has none gets it by add_pods.sql.
UPDATE {table} AS p
SET namespace = i.namespace, name = i.name, workload = i.workload, queue_ref = i.queue_ref,
    observed_ms = i.observed_ms, content = i.content
FROM incoming i
WHERE p.cluster = i.cluster AND p.uid = i.uid AND {newer}
