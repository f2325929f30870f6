-- All stored digests under the numbers in `incoming` (stream, seq).
SELECT r.seq, r.digest FROM received r JOIN incoming i ON r.stream = i.stream AND r.seq = i.seq
WHERE r.seq BETWEEN $low AND $high
UNION ALL
SELECT f.seq, f.digest FROM pod_fact f JOIN incoming i ON f.stream = i.stream AND f.seq = i.seq
WHERE f.seq BETWEEN $low AND $high
UNION ALL
SELECT q.seq, q.digest FROM quarantine q JOIN incoming i ON q.stream = i.stream AND q.seq = i.seq
WHERE q.seq BETWEEN $low AND $high
