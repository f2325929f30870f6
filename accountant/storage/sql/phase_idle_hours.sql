-- Idle time of holders in whole folded hours. incoming: holder, phase, start_ms (of the hour), end_ms.
SELECT h.gpu, h.device, h.payer, i.phase, sum(h.idle_us)
FROM hour h JOIN incoming i ON h.payer = i.holder AND h.at_ms = i.start_ms
WHERE h.at_ms BETWEEN $low AND $high AND h.idle_us > 0
GROUP BY ALL
