-- The first and the last instant at which each holder held a GPU, to the hour where the rows are folded. incoming: id.
SELECT payer, min(low), max(high) FROM (
    SELECT payer, at_ms AS low, at_ms + 3600000 AS high FROM hour_of_all
    WHERE payer IN (SELECT id FROM incoming) AND busy_us + idle_us + unknown_us > 0
    UNION ALL
    SELECT payer, start_ms, end_ms FROM present
    WHERE start_ms >= $low AND start_ms - start_ms % 3600000 IN (FROM unfolded)
      AND payer IN (SELECT id FROM incoming) AND busy_us + idle_us + unknown_us > 0
)
GROUP BY payer
