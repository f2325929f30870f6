-- Sums per tag of whole hours that are folded, of all devices together.
-- payers: id, class; who has none is left out, or with $every class 1 as one of all (0 is nobody).
-- incoming: tag, gpu (always 0), at_ms.
SELECT i.tag, 0, 0, coalesce(p.class, least(h.payer, 1)),
       sum(busy_us)::BIGINT, sum(idle_us)::BIGINT, sum(unknown_us)::BIGINT, sum(unheld_us)::BIGINT,
       sum(down_us)::BIGINT, sum(borrowed_us)::BIGINT, sum(unattributed_us)::BIGINT,
       sum(memory_mib_s)::BIGINT, sum(energy_uj), sum(energy_blind_us)::BIGINT
FROM hour_of_all h JOIN incoming i ON h.at_ms = i.at_ms
LEFT JOIN payers p ON p.id = h.payer
WHERE h.at_ms BETWEEN $low AND $high AND ($every OR p.class IS NOT NULL)
GROUP BY ALL
