-- The rows of the folded hours or quarter-hours in [$low, $high), with the start of theirs as at_ms. $width: its length.
SELECT *, start_ms - start_ms % $width AS at_ms FROM entry
WHERE start_ms >= $low AND start_ms - start_ms % $width >= $low AND start_ms - start_ms % $width + $width <= $high
  AND start_ms - start_ms % 3600000 NOT IN (FROM unfolded)
