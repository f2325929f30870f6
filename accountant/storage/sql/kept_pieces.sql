-- The remaining spans of sets that were cut earlier. incoming: stream, seq (= set_seq).
SELECT DISTINCT p.stream, p.set_seq, p.start_ms, p.end_ms
FROM piece p JOIN incoming i ON p.stream = i.stream AND p.set_seq = i.seq
ORDER BY ALL
