-- Sums of counted time in [$low, $high), grouped by {tag}, {gpu}, {device} and {payer}
-- (accountant.storage.query.usage_sums). {source}: a table of sums or rows as e; unless all regions are one stretch, it
-- is joined with the requested regions, incoming as i: tag, gpu (0: every), at_ms or start_ms and end_ms. {joins}:
-- kinds of devices as k, classes of payers as p. {of}: the column that holds the time. {only}: a condition on GPUs.
-- {figures}: the summed columns.
SELECT {tag} AS tag, {gpu} AS of_gpu, {device} AS of_device, {payer} AS of_payer, {figures}
FROM {source} {joins}
WHERE {of} >= $low AND {of} < $high {only}
GROUP BY ALL
