-- First booked start and newest booked end of every GPU on every node, of imports and of agents apart. A row that
-- only prolongs a tenure is not written down until its hour is folded: until then the rows themselves tell.
-- $low, $high: around the unfolded hours.
SELECT t.gpu, g.cluster, g.gpu_uuid, (SELECT max(d.gpu_model) FROM device d WHERE d.gpu = t.gpu), t.node,
       min(t.first_ms), max(t.last_ms), t.imported
FROM (
    FROM tenure
    UNION ALL
    SELECT r.gpu, s.node, min(r.start_ms), max(r.end_ms), starts_with(s.epoch, 'import:') AS imported
    FROM received r JOIN stream s ON s.id = r.stream
    WHERE r.start_ms >= $low AND r.start_ms < $high
    GROUP BY ALL
) t JOIN gpu g ON g.id = t.gpu
GROUP BY ALL
