-- The queue that each holder's pod asked for, by the newest word that names one. incoming: id.
SELECT h.id, h.cluster, h.uid,
       CASE WHEN s.observed_ms > p.observed_ms OR starts_with(s.queue_ref, p.queue_ref || '@') THEN coalesce(nullif(s.queue_ref, ''), p.queue_ref)
            ELSE coalesce(nullif(p.queue_ref, ''), s.queue_ref, '') END
FROM holder h
JOIN incoming i ON h.id = i.id
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
LEFT JOIN pod_seen s ON s.cluster = h.cluster AND s.uid = h.uid
