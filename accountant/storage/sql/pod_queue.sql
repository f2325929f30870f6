-- The queue that a pod requested, from its rows in pod as p and in pod_seen as s, as
-- accountant.core.pod_sources.queue_of computes it.
CASE WHEN coalesce(s.queue_ref, '') = '' THEN coalesce(p.queue_ref, '')
     WHEN coalesce(p.queue_ref, '') IN ('', s.queue_ref) OR starts_with(s.queue_ref, p.queue_ref || '@') THEN s.queue_ref
     WHEN coalesce(CAST(s.content ->> 'queue_ms' AS BIGINT), 9000000000000000 - s.observed_ms)
          <= coalesce(CAST(p.content ->> 'queue_ms' AS BIGINT), 9000000000000000 - p.observed_ms) THEN s.queue_ref
     ELSE p.queue_ref END
