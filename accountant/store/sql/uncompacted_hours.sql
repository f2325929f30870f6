-- Hours in which a key stands in several rows.
SELECT DISTINCT at_ms FROM (
    SELECT at_ms FROM hour GROUP BY at_ms, gpu, device, payer HAVING count(*) > 1
    UNION ALL
    SELECT at_ms - at_ms % 3600000 FROM quarter GROUP BY at_ms, gpu, device, payer HAVING count(*) > 1
)
