-- Where stored sums differ from the sums of their rows, and by how much. {table}: the table of the stored sums.
-- {condition}: which of them are compared. {rows}: a query for their rows, each with the at_ms of its sum.
WITH stored AS (
    SELECT at_ms, gpu, device, payer, sum(busy_us) AS busy_us, sum(idle_us) AS idle_us, sum(unknown_us) AS unknown_us,
           sum(unheld_us) AS unheld_us, sum(down_us) AS down_us
    FROM {table} WHERE {condition} GROUP BY ALL
),
computed AS (
    SELECT at_ms, gpu, device, payer, sum(busy_us) AS busy_us, sum(idle_us) AS idle_us, sum(unknown_us) AS unknown_us,
           sum(unheld_us) AS unheld_us, sum(down_us) AS down_us
    FROM ({rows}) GROUP BY ALL
)
SELECT coalesce(s.at_ms, c.at_ms), coalesce(s.busy_us, 0) - coalesce(c.busy_us, 0) AS busy,
       coalesce(s.idle_us, 0) - coalesce(c.idle_us, 0) AS idle,
       coalesce(s.unknown_us, 0) - coalesce(c.unknown_us, 0) AS unknown,
       coalesce(s.unheld_us, 0) - coalesce(c.unheld_us, 0) AS unheld,
       coalesce(s.down_us, 0) - coalesce(c.down_us, 0) AS down
FROM stored s FULL JOIN computed c
  ON c.at_ms = s.at_ms AND c.gpu = s.gpu AND c.device = s.device AND c.payer = s.payer
WHERE busy != 0 OR idle != 0 OR unknown != 0 OR unheld != 0 OR down != 0
ORDER BY ALL
