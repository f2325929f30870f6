-- The folded hours in which holders left something idle inside their phases and [$start, $end), and the part of each
-- that is inside. incoming: holder, phase, start_ms, end_ms.
SELECT i.holder, i.phase, greatest(h.at_ms, i.start_ms, $start), least(h.at_ms + 3600000, i.end_ms, $end)
FROM hour_of_all h JOIN incoming i ON h.payer = i.holder AND h.at_ms < i.end_ms AND h.at_ms > i.start_ms - 3600000
WHERE h.at_ms > $start - 3600000 AND h.at_ms < $end AND h.idle_us > 0
