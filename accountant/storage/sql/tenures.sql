-- First booked start and newest booked end of every GPU on every node, separately for imports and agents. A row that
-- only prolongs a tenure is stored in the tenure when its hour is folded; until then this statement reads the rows.
-- $low, $high: around the hours that are not folded.
SELECT t.gpu, g.cluster, g.gpu_uuid, (SELECT max(d.gpu_model) FROM device d WHERE d.gpu = t.gpu), t.node,
       min(t.first_ms), max(t.last_ms), t.imported
FROM (
    FROM tenure
    UNION ALL
    SELECT r.gpu, s.node, min(r.start_ms), max(r.end_ms), starts_with(s.epoch, 'import:') AS imported
    FROM received r JOIN stream s ON s.id = r.stream
    WHERE r.start_ms >= $low AND r.start_ms < $high AND r.method != 'withdrawn'
    GROUP BY ALL
) t JOIN gpu g ON g.id = t.gpu
GROUP BY ALL
