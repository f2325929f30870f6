-- Sums of rows by tag, span, group of GPUs and queue. First come allocated, busy, energy and lost, each multiplied by the
-- weight of the row's span and rounded as in accountant.core.window_decay.term; then, without the weight, allocated,
-- unheld, lost, unknown and the time without energy. incoming: tag, gpu (0: every GPU), start_ms and end_ms of rows,
-- by_span (whether spans are distinguished), weight. kinds: the group of every device.
WITH origin AS ({holder_origins})
SELECT i.tag, e.start_ms * i.by_span::INTEGER, e.end_ms * i.by_span::INTEGER, k.kind, o.queue_ref,
       sum(CAST(floor((e.busy_us + e.idle_us + e.unknown_us) * i.weight + 0.5) AS BIGINT)),
       sum(CAST(floor(e.busy_us * i.weight + 0.5) AS BIGINT)),
       sum(CAST(floor(e.energy_uj * i.weight + 0.5) AS BIGINT)),
       sum(CAST(floor(e.down_us * i.weight + 0.5) AS BIGINT)),
       sum(e.busy_us + e.idle_us + e.unknown_us), sum(e.unheld_us), sum(e.down_us), sum(e.unknown_us),
       sum(e.energy_blind_us)
FROM entry e
JOIN incoming i ON e.start_ms = i.start_ms AND e.end_ms = i.end_ms AND (i.gpu = 0 OR i.gpu = e.gpu)
JOIN kinds k ON k.id = e.device
LEFT JOIN origin o ON o.id = e.payer
WHERE e.start_ms >= $low AND e.start_ms < $high
GROUP BY ALL
