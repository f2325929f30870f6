-- The figures of decayed.sql for whole quarter-hours of folded hours where nothing decays. incoming: tag, gpu, at_ms.
-- {kind}: see there.
SELECT i.tag, e.payer, {kind},
       sum(e.busy_us + e.idle_us + e.unknown_us), sum(e.busy_us), sum(e.energy_uj), sum(e.down_us),
       sum(e.busy_us + e.idle_us + e.unknown_us), sum(e.unheld_us), sum(e.down_us), sum(e.unknown_us),
       sum(e.energy_blind_us)
FROM quarter e JOIN incoming i ON e.at_ms = i.at_ms {kinds}
WHERE e.at_ms BETWEEN $low AND $high
GROUP BY ALL
