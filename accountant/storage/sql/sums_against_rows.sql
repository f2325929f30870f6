-- Where the stored sums of folded hours differ from their rows, and where the sums of days differ from their
-- quarter-hours. Empty if the ledger is consistent.
SELECT 'hour', coalesce(t.at_ms, e.at_ms) AS at_ms, coalesce(t.busy_us, 0) - coalesce(e.busy_us, 0), coalesce(t.idle_us, 0) - coalesce(e.idle_us, 0), coalesce(t.unknown_us, 0) - coalesce(e.unknown_us, 0), coalesce(t.unheld_us, 0) - coalesce(e.unheld_us, 0), coalesce(t.down_us, 0) - coalesce(e.down_us, 0)
FROM (SELECT at_ms, gpu, device, payer, sum(busy_us) AS busy_us, sum(idle_us) AS idle_us, sum(unknown_us) AS unknown_us, sum(unheld_us) AS unheld_us, sum(down_us) AS down_us FROM hour WHERE at_ms >= $low AND at_ms + 3600000 <= $high GROUP BY ALL) t
FULL JOIN (SELECT start_ms - start_ms % 3600000 AS at_ms, gpu, device, payer, sum(busy_us) AS busy_us, sum(idle_us) AS idle_us, sum(unknown_us) AS unknown_us, sum(unheld_us) AS unheld_us, sum(down_us) AS down_us FROM entry
           WHERE start_ms >= $low AND start_ms - start_ms % 3600000 + 3600000 <= $high AND start_ms - start_ms % 3600000 >= $low
           AND start_ms - start_ms % 3600000 NOT IN (FROM unfolded)
           GROUP BY ALL) e
  ON e.at_ms = t.at_ms AND e.gpu = t.gpu AND e.device = t.device AND e.payer = t.payer
WHERE coalesce(t.busy_us, 0) != coalesce(e.busy_us, 0) OR coalesce(t.idle_us, 0) != coalesce(e.idle_us, 0) OR coalesce(t.unknown_us, 0) != coalesce(e.unknown_us, 0) OR coalesce(t.unheld_us, 0) != coalesce(e.unheld_us, 0) OR coalesce(t.down_us, 0) != coalesce(e.down_us, 0)
UNION ALL
SELECT 'quarter', coalesce(t.at_ms, e.at_ms) AS at_ms, coalesce(t.busy_us, 0) - coalesce(e.busy_us, 0), coalesce(t.idle_us, 0) - coalesce(e.idle_us, 0), coalesce(t.unknown_us, 0) - coalesce(e.unknown_us, 0), coalesce(t.unheld_us, 0) - coalesce(e.unheld_us, 0), coalesce(t.down_us, 0) - coalesce(e.down_us, 0)
FROM (SELECT at_ms, gpu, device, payer, sum(busy_us) AS busy_us, sum(idle_us) AS idle_us, sum(unknown_us) AS unknown_us, sum(unheld_us) AS unheld_us, sum(down_us) AS down_us FROM quarter WHERE at_ms >= $low AND at_ms + 900000 <= $high GROUP BY ALL) t
FULL JOIN (SELECT start_ms - start_ms % 900000 AS at_ms, gpu, device, payer, sum(busy_us) AS busy_us, sum(idle_us) AS idle_us, sum(unknown_us) AS unknown_us, sum(unheld_us) AS unheld_us, sum(down_us) AS down_us FROM entry
           WHERE start_ms >= $low AND start_ms - start_ms % 900000 + 900000 <= $high AND start_ms - start_ms % 900000 >= $low
           AND start_ms - start_ms % 3600000 NOT IN (FROM unfolded)
           GROUP BY ALL) e
  ON e.at_ms = t.at_ms AND e.gpu = t.gpu AND e.device = t.device AND e.payer = t.payer
WHERE coalesce(t.busy_us, 0) != coalesce(e.busy_us, 0) OR coalesce(t.idle_us, 0) != coalesce(e.idle_us, 0) OR coalesce(t.unknown_us, 0) != coalesce(e.unknown_us, 0) OR coalesce(t.unheld_us, 0) != coalesce(e.unheld_us, 0) OR coalesce(t.down_us, 0) != coalesce(e.down_us, 0)
UNION ALL
SELECT 'day', coalesce(t.at_ms, e.at_ms) AS at_ms, coalesce(t.busy_us, 0) - coalesce(e.busy_us, 0), coalesce(t.idle_us, 0) - coalesce(e.idle_us, 0), coalesce(t.unknown_us, 0) - coalesce(e.unknown_us, 0), coalesce(t.unheld_us, 0) - coalesce(e.unheld_us, 0), coalesce(t.down_us, 0) - coalesce(e.down_us, 0)
FROM (SELECT at_ms, gpu, device, payer, sum(busy_us) AS busy_us, sum(idle_us) AS idle_us, sum(unknown_us) AS unknown_us, sum(unheld_us) AS unheld_us, sum(down_us) AS down_us FROM day WHERE at_ms IN (SELECT start_ms FROM kept_day WHERE start_ms >= $low AND end_ms <= $high) GROUP BY ALL) t
FULL JOIN (SELECT k.start_ms AS at_ms, gpu, device, payer, sum(q.busy_us) AS busy_us, sum(q.idle_us) AS idle_us, sum(q.unknown_us) AS unknown_us, sum(q.unheld_us) AS unheld_us, sum(q.down_us) AS down_us FROM quarter q ASOF JOIN kept_day k ON q.at_ms >= k.start_ms
           WHERE q.at_ms < k.end_ms AND k.start_ms >= $low AND k.end_ms <= $high AND q.at_ms >= $low AND q.at_ms < $high GROUP BY ALL) e
  ON e.at_ms = t.at_ms AND e.gpu = t.gpu AND e.device = t.device AND e.payer = t.payer
WHERE coalesce(t.busy_us, 0) != coalesce(e.busy_us, 0) OR coalesce(t.idle_us, 0) != coalesce(e.idle_us, 0) OR coalesce(t.unknown_us, 0) != coalesce(e.unknown_us, 0) OR coalesce(t.unheld_us, 0) != coalesce(e.unheld_us, 0) OR coalesce(t.down_us, 0) != coalesce(e.down_us, 0)
