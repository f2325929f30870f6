-- Sums per tag of whole hours that are folded, of all devices together.
-- payers: id, class; who has none is left out, or with $every class 1 as one of all (0 is nobody).
-- incoming: tag, gpu (always 0), at_ms.
SELECT i.tag, 0, 0, coalesce(p.class, least(h.payer, 1)),
       sum(busy_us), sum(idle_us), sum(unknown_us), sum(unheld_us), sum(down_us), sum(borrowed_us), sum(unattributed_us),
       sum(memory_mib_s), sum(energy_uj), sum(energy_blind_us)
FROM hour_of_all h JOIN incoming i ON h.at_ms = i.at_ms
LEFT JOIN payers p ON p.id = h.payer
WHERE h.at_ms BETWEEN $low AND $high AND ($every OR p.class IS NOT NULL)
GROUP BY ALL
