-- The queue that each pod requested, computed as in holder_origins.sql. incoming: cluster, uid.
SELECT i.cluster, i.uid,
       CASE WHEN coalesce(s.queue_ref, '') = '' THEN coalesce(p.queue_ref, '')
            WHEN coalesce(p.queue_ref, '') IN ('', s.queue_ref) OR starts_with(s.queue_ref, p.queue_ref || '@') THEN s.queue_ref
            WHEN coalesce(CAST(s.content ->> 'queue_ms' AS BIGINT), 9000000000000000 - s.observed_ms)
                 <= coalesce(CAST(p.content ->> 'queue_ms' AS BIGINT), 9000000000000000 - p.observed_ms) THEN s.queue_ref
            ELSE p.queue_ref END
FROM incoming i
LEFT JOIN pod p ON p.cluster = i.cluster AND p.uid = i.uid
LEFT JOIN pod_seen s ON s.cluster = i.cluster AND s.uid = i.uid
