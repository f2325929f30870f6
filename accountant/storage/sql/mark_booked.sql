-- Records whether sets count as they were received. Rows are replaced and not updated (accountant.storage.transactions).
-- incoming: stream, seq (= set_seq), booked.
CREATE OR REPLACE TEMP TABLE marked AS
SELECT r.* REPLACE (i.booked AS booked)
FROM received r JOIN incoming i ON r.stream = i.stream AND r.set_seq = i.seq
WHERE r.start_ms >= $low AND r.start_ms < $high AND r.booked != i.booked;
DELETE FROM received USING marked m
WHERE received.stream = m.stream AND received.seq = m.seq AND received.start_ms >= $low AND received.start_ms < $high;
INSERT INTO received FROM marked;
DROP TABLE marked
