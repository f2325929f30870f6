-- The figures of decayed.sql for whole quarter-hours of folded hours where nothing decays. incoming: tag, gpu, at_ms.
SELECT i.tag, q.payer,
       sum(q.busy_us + q.idle_us + q.unknown_us), sum(q.busy_us), sum(q.energy_uj), sum(q.down_us),
       sum(q.busy_us + q.idle_us + q.unknown_us), sum(q.unheld_us), sum(q.down_us), sum(q.unknown_us),
       sum(q.energy_blind_us)
FROM quarter q JOIN incoming i ON q.at_ms = i.at_ms
WHERE q.at_ms BETWEEN $low AND $high
GROUP BY ALL
