-- Sums of what counts in [$low, $high), told apart as {tag}, {gpu}, {device} and {payer} say (accountant.storage.query.usage_sums).
-- {source}: a table of sums or of rows as e, joined with what is asked for where that is not a stretch: incoming as i,
-- of tag, gpu (0 = every) and at_ms or start_ms and end_ms. {joins}: kinds of devices as k, classes of payers as p.
-- {of}: the column by which time is told. {only}: a condition on GPUs. {figures}: what is added up.
SELECT {tag} AS tag, {gpu} AS of_gpu, {device} AS of_device, {payer} AS of_payer, {figures}
FROM {source} {joins}
WHERE {of} >= $low AND {of} < $high {only}
GROUP BY ALL
