-- Holders with GPU time in [$low, $high). Hours at the ends are included whole.
SELECT payer FROM hour_of_all WHERE at_ms > $low - 3600000 AND at_ms < $high
UNION
SELECT payer FROM present
WHERE start_ms > $low - 3600000 AND start_ms < $high AND start_ms - start_ms % 3600000 IN (FROM unfolded)
