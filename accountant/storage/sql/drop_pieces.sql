-- Removes the remaining parts of sets that were cut. incoming: stream, seq (= set_seq).
DELETE FROM piece USING incoming i WHERE piece.stream = i.stream AND piece.set_seq = i.seq
