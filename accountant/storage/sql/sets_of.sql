-- The sets with a row, around $low to $high, that one of some holders pays. {payers}: their numbers.
SELECT stream, set_seq FROM entry WHERE start_ms > $low AND start_ms < $high AND payer IN ({payers})
