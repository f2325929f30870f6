-- One row per GPU, node and kind of source. It includes the rows of hours that are not folded yet (see tenures.sql).
CREATE OR REPLACE TEMP TABLE compacted AS
SELECT gpu, node, min(first_ms), max(last_ms), imported
FROM (
    FROM tenure
    UNION ALL
    SELECT r.gpu, s.node, min(r.start_ms), max(r.end_ms), starts_with(s.epoch, 'import:')
    FROM received r JOIN stream s ON s.id = r.stream
    WHERE r.start_ms >= $low AND r.start_ms < $high AND r.method != 'withdrawn'
    GROUP BY ALL
)
GROUP BY ALL ORDER BY ALL
