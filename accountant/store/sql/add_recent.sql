-- Rows of this transaction that count as they are, into the quarter-hourly sums.
INSERT INTO recent
SELECT start_ms - start_ms % 900000, gpu, device, payer,
       sum(busy_us), sum(idle_us), sum(unknown_us), sum(unheld_us), sum(down_us), sum(borrowed_us), sum(unattributed_us),
       sum(memory_mib_s), sum(energy_uj), sum(energy_blind_us)
FROM incoming WHERE booked GROUP BY ALL
