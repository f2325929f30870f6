-- The sums of window_rows.sql for whole quarter-hours of folded hours, without decay. incoming: at_ms.
WITH origin AS ({holder_origins})
SELECT e.at_ms, 0, 0, k.kind, o.queue_ref,
       sum(e.busy_us + e.idle_us + e.unknown_us), sum(e.busy_us), sum(e.energy_uj), sum(e.down_us),
       sum(e.busy_us + e.idle_us + e.unknown_us), sum(e.unheld_us), sum(e.down_us), sum(e.unknown_us),
       sum(e.energy_blind_us)
FROM quarter e JOIN incoming i ON e.at_ms = i.at_ms JOIN kinds k ON k.id = e.device
LEFT JOIN origin o ON o.id = e.payer
WHERE e.at_ms >= $low AND e.at_ms < $high
GROUP BY ALL
