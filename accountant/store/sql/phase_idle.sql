-- Idle time of holders inside their phases and the span [$start, $end). incoming: holder, phase, start_ms, end_ms.
-- A row's part is a difference of one cumulative floor, as agent.units.prorate takes it.
SELECT e.gpu, e.device, e.payer, i.phase,
       sum(e.idle_us * (least(e.end_ms, i.end_ms, $end) - e.start_ms) // (e.end_ms - e.start_ms)
         - e.idle_us * (greatest(e.start_ms, i.start_ms, $start) - e.start_ms) // (e.end_ms - e.start_ms))
FROM entry e JOIN incoming i ON e.payer = i.holder AND e.start_ms < i.end_ms AND e.end_ms > i.start_ms
WHERE e.start_ms > $low AND e.start_ms < $end AND e.end_ms > $start AND e.idle_us > 0
GROUP BY ALL
