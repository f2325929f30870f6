-- The queue that each holder's pod requested, as accountant.billing.queue_waits.queue_of computes it. The braces hold
-- the payers.
SELECT h.id,
       CASE WHEN coalesce(s.queue_ref, '') = '' THEN coalesce(p.queue_ref, '')
            WHEN coalesce(p.queue_ref, '') IN ('', s.queue_ref) OR starts_with(s.queue_ref, p.queue_ref || '@') THEN s.queue_ref
            WHEN coalesce(CAST(s.content ->> 'queue_ms' AS BIGINT), 9000000000000000 - s.observed_ms)
                 <= coalesce(CAST(p.content ->> 'queue_ms' AS BIGINT), 9000000000000000 - p.observed_ms) THEN s.queue_ref
            ELSE p.queue_ref END AS queue_ref
FROM holder h
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
LEFT JOIN pod_seen s ON s.cluster = h.cluster AND s.uid = h.uid
WHERE h.id <> 0 AND h.id IN ({payers})
