-- Rows of sets as received. incoming: stream, seq (= set_seq).
SELECT r.stream, r.set_seq, r.start_ms, r.end_ms, r.seq, r.gpu, r.device, r.payer, {cells}
FROM received r JOIN incoming i ON r.stream = i.stream AND r.set_seq = i.seq
WHERE r.start_ms >= $low AND r.start_ms < $high
ORDER BY r.stream, r.set_seq, r.seq
