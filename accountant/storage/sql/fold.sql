-- The rows of the hours in `incoming` (at_ms), summed per quarter-hour.
CREATE OR REPLACE TEMP TABLE folded AS
SELECT start_ms - start_ms % 900000 AS at_ms, gpu, device, payer,
       sum(busy_us)::BIGINT AS busy_us, sum(idle_us)::BIGINT AS idle_us, sum(unknown_us)::BIGINT AS unknown_us,
       sum(unheld_us)::BIGINT AS unheld_us, sum(down_us)::BIGINT AS down_us, sum(borrowed_us)::BIGINT AS borrowed_us,
       sum(unattributed_us)::BIGINT AS unattributed_us, sum(memory_mib_s)::BIGINT AS memory_mib_s,
       sum(energy_uj)::BIGINT AS energy_uj, sum(energy_blind_us)::BIGINT AS energy_blind_us,
       sum(memory_blind_us)::BIGINT AS memory_blind_us
FROM present WHERE start_ms >= $low AND start_ms < $high
  AND start_ms - start_ms % 3600000 IN (SELECT at_ms FROM incoming)
GROUP BY ALL ORDER BY at_ms, gpu, device, payer
