-- The holders of a span, except number 0, by the requested properties: each combination, with the holders that have it.
-- {joins}: holder_labels.sql, holder_users.sql and holder_exports.sql if they are needed.
WITH incoming AS (SELECT payer AS id FROM ({payers}) WHERE payer != 0),
holder_columns AS (
    SELECT n.id, n.cluster, n.namespace, n.name, n.container, n.queue_ref,
           coalesce(nullif(n.workload, ''), upper(n.kind[1]) || lower(n.kind[2:]) || '/' || coalesce(nullif(n.name, ''), n.uid)) AS job,
           {labels} AS labels, {exported} AS exported, {user} AS "user"
    FROM ({holder_names}) n(id, cluster, kind, uid, namespace, name, container, queue_ref, workload)
    {joins}
)
SELECT {columns}, list(id) FROM holder_columns WHERE {filter} GROUP BY {columns} ORDER BY {columns}
