-- Pods that existed in [$low, $high), as their nodes and the API server report them. {columns}: what is read of them.
-- {pod}, {seen}: the tables, or the selected rows of them. {only}: a condition on the instants of both; all instants are taken out of a pod's JSON at
-- once. {placed}: further instants at which a pod can begin.
WITH p AS (
    SELECT cluster, uid, namespace, name, workload, observed_ms, content,
           content ->> ['$.created_ms', '$.scheduled_ms', '$.started_ms', '$.ended_ms', '$.stop.how'] AS at FROM {pod}
),
s AS (
    SELECT cluster, uid, namespace, name, workload, observed_ms, content,
           content ->> ['$.created_ms', '$.scheduled_ms', '$.started_ms', '$.ended_ms', '$.stop.how'] AS at FROM {seen}
)
SELECT {columns}
FROM p FULL JOIN s ON p.cluster = s.cluster AND p.uid = s.uid
WHERE coalesce(CAST(s.at[1] AS BIGINT), CAST(p.at[1] AS BIGINT){placed}) < $high
  AND coalesce(CAST(s.at[4] AS BIGINT), CAST(p.at[4] AS BIGINT), $low) >= $low{only} {ending}
