-- The queue that pods asked for, as holder_origins.sql says it of holders. incoming: cluster, uid.
SELECT i.cluster, i.uid,
       CASE WHEN s.observed_ms > p.observed_ms OR starts_with(s.queue_ref, p.queue_ref || '@') THEN coalesce(nullif(s.queue_ref, ''), p.queue_ref)
            ELSE coalesce(nullif(p.queue_ref, ''), s.queue_ref, '') END
FROM incoming i
LEFT JOIN pod p ON p.cluster = i.cluster AND p.uid = i.uid
LEFT JOIN pod_seen s ON s.cluster = i.cluster AND s.uid = i.uid
