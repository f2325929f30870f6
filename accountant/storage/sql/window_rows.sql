-- Sums of rows by tag, span, place and queue. First come allocated, busy, energy and lost, each decayed to the instant
-- reference_ms; then, without decay, allocated, unheld, lost, unknown and the time without energy. The weight equals
-- accountant.core.window_decay.factor and the rounding accountant.core.window_decay.term, operation by operation.
-- incoming: tag, gpu (0: every), start_ms, end_ms, reference_ms, by_span (1: group by the spans of the rows); one span
-- lies in one quarter-hour. kinds: the place of every device. $half_life_ms null: no decay. The braces hold weight.sql
-- and holder_origins.sql.
WITH origin AS ({origins}),
inside AS (
    SELECT i.tag, i.by_span, i.reference_ms, e.*,
           (e.end_ms - e.start_ms) / $half_life_ms::DOUBLE * 0.6931471805599453::DOUBLE AS x
    FROM entry e JOIN incoming i ON e.start_ms // 900000 = i.start_ms // 900000
    WHERE e.start_ms >= i.start_ms AND e.end_ms <= i.end_ms AND (i.gpu IN (0, e.gpu))
      AND e.start_ms >= $low AND e.start_ms < $high
), weighted AS (
    SELECT *, coalesce({weight}, 1.0::DOUBLE) AS weight
    FROM inside
)
SELECT e.tag, e.start_ms * e.by_span, e.end_ms * e.by_span, k.kind, o.queue_ref,
       sum(CAST(floor((e.busy_us + e.idle_us + e.unknown_us) * e.weight + 0.5) AS BIGINT)),
       sum(CAST(floor((e.busy_us) * e.weight + 0.5) AS BIGINT)),
       sum(CAST(floor((e.energy_uj) * e.weight + 0.5) AS BIGINT)),
       sum(CAST(floor((e.down_us) * e.weight + 0.5) AS BIGINT)),
       sum(e.busy_us + e.idle_us + e.unknown_us), sum(e.unheld_us), sum(e.down_us), sum(e.unknown_us),
       sum(e.energy_blind_us)
FROM weighted e JOIN kinds k ON k.id = e.device LEFT JOIN origin o ON o.id = e.payer
GROUP BY ALL
