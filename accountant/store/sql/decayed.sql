-- Figures of rows inside stretches: allocated, busy, energy and lost, each decayed to the end of its stretch
-- and rounded as in accountant.windows.term; then plain: allocated, unheld, lost, unknown, without energy.
-- incoming: tag, gpu (0 = every), start_ms, end_ms, weight.
SELECT i.tag, e.payer,
       sum(CAST(floor((e.busy_us + e.idle_us + e.unknown_us) * i.weight + 0.5) AS BIGINT)),
       sum(CAST(floor((e.busy_us) * i.weight + 0.5) AS BIGINT)),
       sum(CAST(floor((e.energy_uj) * i.weight + 0.5) AS BIGINT)),
       sum(CAST(floor((e.down_us) * i.weight + 0.5) AS BIGINT)),
       sum(e.busy_us + e.idle_us + e.unknown_us), sum(e.unheld_us), sum(e.down_us), sum(e.unknown_us),
       sum(e.energy_blind_us)
FROM entry e JOIN incoming i ON e.start_ms = i.start_ms AND e.end_ms = i.end_ms AND (i.gpu = 0 OR i.gpu = e.gpu)
WHERE e.start_ms >= $low AND e.start_ms < $high
GROUP BY ALL
