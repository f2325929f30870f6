-- The rows of the hours in `incoming` (at_ms), summed per quarter-hour.
CREATE OR REPLACE TEMP TABLE folded AS
SELECT start_ms - start_ms % 900000 AS at_ms, gpu, device, payer, {sums_of_cells}
FROM present WHERE start_ms >= $low AND start_ms < $high
  AND start_ms - start_ms % 3600000 IN (SELECT at_ms FROM incoming)
GROUP BY ALL ORDER BY at_ms, gpu, device, payer
