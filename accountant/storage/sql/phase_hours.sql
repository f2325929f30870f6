-- Folded hours in which holders have idle time inside their phases and inside [$start, $end), and the part of each hour
-- that lies inside. incoming: holder, phase, start_ms, end_ms.
SELECT i.holder, i.phase, greatest(h.at_ms, i.start_ms, $start), least(h.at_ms + 3600000, i.end_ms, $end)
FROM hour_of_all h JOIN incoming i ON h.payer = i.holder AND h.at_ms < i.end_ms AND h.at_ms > i.start_ms - 3600000
WHERE h.at_ms > $start - 3600000 AND h.at_ms < $end AND h.idle_us > 0
