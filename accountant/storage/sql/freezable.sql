-- Folded hours before $before whose rows all count as received and are in the archive.
SELECT at_ms FROM (
    SELECT r.start_ms - r.start_ms % 3600000 AS at_ms
    FROM received r LEFT JOIN archive_mark a ON a.stream = r.stream
    WHERE r.start_ms < $before
    GROUP BY ALL HAVING bool_and(r.booked) AND bool_and(r.seq <= coalesce(a.seq, 0))
)
WHERE at_ms + 3600000 <= $before AND at_ms NOT IN (FROM unfolded) AND at_ms NOT IN (FROM frozen)
  AND at_ms NOT IN (SELECT start_ms - start_ms % 3600000 FROM piece)
ORDER BY ALL
