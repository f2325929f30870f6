-- Computes the sums of the day [$start, $end) from its hours or quarter-hours. {source}: the table of these.
INSERT INTO day
SELECT $start, gpu, device, payer, {sums_of_cells}
FROM {source} WHERE at_ms >= $start AND at_ms < $end
GROUP BY ALL ORDER BY gpu, device, payer
