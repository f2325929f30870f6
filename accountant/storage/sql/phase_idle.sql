-- Idle time of holders inside their phases, from rows. incoming: holder, phase, start_ms, end_ms. $low: one
-- quarter-hour before the first phase; $high: the end of the last. The share of a row is a difference of cumulative
-- floors, as in gputally.base.apportionment.prorate.
SELECT e.gpu, e.device, e.payer, i.phase,
       sum(e.idle_us * (least(e.end_ms, i.end_ms) - e.start_ms) // (e.end_ms - e.start_ms)
         - e.idle_us * (greatest(e.start_ms, i.start_ms) - e.start_ms) // (e.end_ms - e.start_ms))
FROM entry e JOIN incoming i ON e.payer = i.holder AND e.start_ms < i.end_ms AND e.end_ms > i.start_ms
WHERE e.start_ms > $low AND e.start_ms < $high AND e.idle_us > 0
GROUP BY ALL
