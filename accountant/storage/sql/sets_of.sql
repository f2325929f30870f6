-- Sets with a row, near $low to $high, that one of some holders pays. {payers}: the holders' numbers.
SELECT stream, set_seq FROM entry WHERE start_ms > $low AND start_ms < $high AND payer IN ({payers})
