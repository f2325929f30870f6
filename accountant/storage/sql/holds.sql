-- Spans in which a holder held a GPU, or a part of one, without a break of more than $gap ms, the newest first.
-- {ranges}: rows near the queried spans. {only}: a condition on them, which may name `incoming`. $most: number of spans at
-- most.
WITH held AS (
    SELECT payer, gpu, device, start_ms, end_ms, busy_us + idle_us + unknown_us AS held_us
    FROM ({ranges})
    WHERE payer != 0 AND busy_us + idle_us + unknown_us > 0 AND {only}
),
joined AS (
    SELECT *, coalesce(start_ms > max(end_ms) OVER before + $gap, true) AS begins
    FROM held
    WINDOW before AS (
        PARTITION BY payer, device ORDER BY start_ms, end_ms ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
),
numbered AS (
    SELECT *, count(*) FILTER (begins) OVER (PARTITION BY payer, device ORDER BY start_ms, end_ms ROWS UNBOUNDED PRECEDING) AS run
    FROM joined
)
SELECT n.payer, h.uid, d.node, g.gpu_uuid, d.profile, n.device, min(n.start_ms), max(n.end_ms), CAST(sum(n.held_us) AS BIGINT)
FROM numbered n
JOIN holder h ON h.id = n.payer
JOIN device d ON d.id = n.device
JOIN gpu g ON g.id = n.gpu
GROUP BY n.payer, h.uid, n.device, d.node, g.gpu_uuid, d.profile, d.gi, d.ci, n.run
ORDER BY max(n.end_ms) DESC, min(n.start_ms) DESC, d.node, g.gpu_uuid, d.gi, d.ci, h.uid
LIMIT $most
