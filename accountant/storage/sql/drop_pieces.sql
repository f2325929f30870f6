DELETE FROM piece USING incoming i WHERE piece.stream = i.stream AND piece.set_seq = i.seq
