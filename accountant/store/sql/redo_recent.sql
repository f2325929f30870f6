-- The quarter-hourly sums of the hours in `incoming` (tag, gpu, at_ms), from the rows that count.
INSERT INTO recent
SELECT e.start_ms - e.start_ms % 900000, e.gpu, e.device, e.payer,
       sum(busy_us), sum(idle_us), sum(unknown_us), sum(unheld_us), sum(down_us), sum(borrowed_us), sum(unattributed_us),
       sum(memory_mib_s), sum(energy_uj), sum(energy_blind_us)
FROM entry e JOIN incoming i ON e.gpu = i.gpu AND e.start_ms - e.start_ms % 3600000 = i.at_ms
WHERE e.start_ms >= $low AND e.start_ms < $high
GROUP BY ALL
