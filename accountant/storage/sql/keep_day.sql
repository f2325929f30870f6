-- Computes the sums of the day [$start, $end) from its hours or quarter-hours. {source}: the table of these.
INSERT INTO day
SELECT $start, gpu, device, payer,
       sum(busy_us), sum(idle_us), sum(unknown_us), sum(unheld_us), sum(down_us), sum(borrowed_us), sum(unattributed_us),
       sum(memory_mib_s), sum(energy_uj), sum(energy_blind_us), sum(memory_blind_us)
FROM {source} WHERE at_ms >= $start AND at_ms < $end
GROUP BY ALL ORDER BY gpu, device, payer
