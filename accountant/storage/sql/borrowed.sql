-- The quarter-hours between $low and $high in which the busy time of a GPU exceeds its allocated time.
SELECT at_ms, gpu FROM quarter WHERE borrowed_us > 0 AND at_ms > $low AND at_ms < $high
UNION
SELECT start_ms - start_ms % 900000, gpu FROM present
WHERE borrowed_us > 0 AND start_ms - start_ms % 900000 > $low AND start_ms > $low AND start_ms < $high
  AND start_ms - start_ms % 3600000 IN (FROM unfolded)
ORDER BY ALL
