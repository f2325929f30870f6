-- Figures of rows inside stretches: allocated, busy, energy and lost, each decayed to its stretch's reference;
-- then plain: allocated, unheld, lost, unknown, without energy. The weight is accountant.core.window_decay.factor and the
-- rounding accountant.core.window_decay.term, operation by operation. incoming: tag, gpu (0 = every), start_ms, end_ms,
-- reference_ms; one stretch lies in one quarter-hour. $half_life_ms null: nothing decays. $apart 1: by the spans of
-- the rows, 0: of all together. The weight: weight.sql. {kind}: 0, or the class of the device (`by_kind`).
-- {only}: a condition on rows (accountant.storage.query.window_figures).
WITH inside AS (
    SELECT i.tag, i.reference_ms, e.*, (e.end_ms - e.start_ms) / $half_life_ms::DOUBLE * 0.6931471805599453::DOUBLE AS x
    FROM entry e JOIN incoming i ON e.start_ms - e.start_ms % 900000 = i.start_ms - i.start_ms % 900000
    WHERE e.start_ms >= i.start_ms AND e.end_ms <= i.end_ms AND (i.gpu = 0 OR i.gpu = e.gpu)
      AND e.start_ms >= $low AND e.start_ms < $high {only}
), weighted AS (
    SELECT *, coalesce({weight}, 1.0::DOUBLE) AS weight
    FROM inside
)
SELECT e.tag, e.payer, e.start_ms * $apart, e.end_ms * $apart, {kind},
       sum(CAST(floor((e.busy_us + e.idle_us + e.unknown_us) * e.weight + 0.5) AS BIGINT)),
       sum(CAST(floor((e.busy_us) * e.weight + 0.5) AS BIGINT)),
       sum(CAST(floor((e.energy_uj) * e.weight + 0.5) AS BIGINT)),
       sum(CAST(floor((e.down_us) * e.weight + 0.5) AS BIGINT)),
       sum(e.busy_us + e.idle_us + e.unknown_us), sum(e.unheld_us), sum(e.down_us), sum(e.unknown_us),
       sum(e.energy_blind_us)
FROM weighted e {kinds}
GROUP BY ALL
