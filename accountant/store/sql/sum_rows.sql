-- Sums per tag of the rows in buckets of $width ms that are not folded. $device 0: of all devices together.
-- kinds: id, kind of devices; empty where they are told apart no further than $device says.
-- payers: id, class; who has none is left out, or with $every class 1 as one of all (0 is nobody).
-- incoming: tag, gpu (0 = every), at_ms.
SELECT i.tag, e.gpu * $device, coalesce(k.kind, e.device * $device), coalesce(p.class, least(e.payer, 1)),
       sum(busy_us)::BIGINT, sum(idle_us)::BIGINT, sum(unknown_us)::BIGINT, sum(unheld_us)::BIGINT,
       sum(down_us)::BIGINT, sum(borrowed_us)::BIGINT, sum(unattributed_us)::BIGINT,
       sum(memory_mib_s)::BIGINT, sum(energy_uj), sum(energy_blind_us)::BIGINT
FROM present e JOIN incoming i ON e.start_ms - e.start_ms % $width = i.at_ms AND (i.gpu = 0 OR i.gpu = e.gpu)
LEFT JOIN payers p ON p.id = e.payer
LEFT JOIN kinds k ON k.id = e.device
WHERE e.start_ms >= $low AND e.start_ms < $high + $width AND ($every OR p.class IS NOT NULL)
GROUP BY ALL
