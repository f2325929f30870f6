-- The earliest instant to which what is known of each pod applies: its creation, placement or start, or its first hour with
-- GPU time. Rows that are not folded begin at $low or later. incoming: cluster, uid.
WITH held AS (
    SELECT h.id, h.cluster, h.uid FROM holder h JOIN incoming i ON h.cluster = i.cluster AND h.uid = i.uid
)
SELECT cluster, uid, min(at_ms) FROM (
    SELECT cluster, uid, unnest(CAST(content ->> ['$.created_ms', '$.scheduled_ms', '$.started_ms'] AS BIGINT[])) AS at_ms
    FROM (SELECT cluster, uid, content FROM pod UNION ALL SELECT cluster, uid, content FROM pod_seen)
    JOIN incoming USING (cluster, uid)
    UNION ALL
    SELECT cluster, uid, at_ms FROM hour_of_all JOIN held ON payer = id
    UNION ALL
    SELECT cluster, uid, start_ms FROM present JOIN held ON payer = id
    WHERE start_ms >= $low AND start_ms - start_ms % 3600000 IN (FROM unfolded)
)
GROUP BY cluster, uid
HAVING min(at_ms) IS NOT NULL
