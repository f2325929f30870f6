-- Sums per tag of whole quarter-hours of folded hours. $device 0: of all devices together.
-- kinds: id, kind of devices; empty where they are told apart no further than $device says.
-- payers: id, class; who has none is left out, or with $every class 1 as one of all (0 is nobody).
-- incoming: tag, gpu (0 = every), at_ms.
SELECT i.tag, h.gpu * $device, coalesce(k.kind, h.device * $device), coalesce(p.class, least(h.payer, 1)),
       sum(busy_us)::BIGINT, sum(idle_us)::BIGINT, sum(unknown_us)::BIGINT, sum(unheld_us)::BIGINT,
       sum(down_us)::BIGINT, sum(borrowed_us)::BIGINT, sum(unattributed_us)::BIGINT,
       sum(memory_mib_s)::BIGINT, sum(energy_uj), sum(energy_blind_us)::BIGINT
FROM quarter h JOIN incoming i ON h.at_ms = i.at_ms AND (i.gpu = 0 OR i.gpu = h.gpu)
LEFT JOIN payers p ON p.id = h.payer
LEFT JOIN kinds k ON k.id = h.device
WHERE h.at_ms BETWEEN $low AND $high AND ($every OR p.class IS NOT NULL)
GROUP BY ALL
