-- Sets with a row between $low and $high that one of some holders pays. {ids}: the ids of the holders.
SELECT stream, set_seq FROM entry WHERE start_ms > $low AND start_ms < $high AND payer IN ({ids})
