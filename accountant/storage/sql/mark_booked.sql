-- Records whether sets count as they were received. incoming: stream, seq (= set_seq), booked.
UPDATE received SET booked = i.booked
FROM incoming i WHERE received.stream = i.stream AND received.set_seq = i.seq
  AND received.start_ms >= $low AND received.start_ms < $high
