-- Idle time of holders inside their phases, by the rows. incoming: holder, phase, start_ms, end_ms.
-- $low: one quarter-hour before the first; $high: the end of the last.
-- A row's part is a difference of one cumulative floor, as gputally.base.units.prorate takes it.
SELECT e.gpu, e.device, e.payer, i.phase,
       sum(e.idle_us * (least(e.end_ms, i.end_ms) - e.start_ms) // (e.end_ms - e.start_ms)
         - e.idle_us * (greatest(e.start_ms, i.start_ms) - e.start_ms) // (e.end_ms - e.start_ms))
FROM entry e JOIN incoming i ON e.payer = i.holder AND e.start_ms < i.end_ms AND e.end_ms > i.start_ms
WHERE e.start_ms > $low AND e.start_ms < $high AND e.idle_us > 0
GROUP BY ALL
