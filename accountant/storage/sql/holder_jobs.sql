-- The jobs of the holders of $clusters: the workload, or the holder itself if it has none. {only}: a condition
-- on the holders.
WITH incoming AS (SELECT id FROM holder WHERE list_contains($clusters, cluster)),
holder_job AS (
    SELECT id, cluster, namespace,
           coalesce(nullif(workload, ''), upper(kind[1]) || lower(kind[2:]) || '/' || coalesce(nullif(name, ''), uid)) AS job
    FROM ({holder_names}) named(id, cluster, kind, uid, namespace, name, container, queue_ref, workload)
)
FROM holder_job {only}
