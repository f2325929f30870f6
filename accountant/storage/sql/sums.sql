-- Sums of counted time in [$low, $high), grouped by {tag}, {device} and {payer} (accountant.storage.query.usage_sums).
-- {source}: a table of sums or rows as e; unless all buckets form one range, it is joined with the requested spans,
-- incoming as i: tag, gpu (0: every GPU), at_ms or start_ms and end_ms. {joins}: kinds of devices as k, classes of
-- payers as p. {instant}: the column that is compared with the range. {condition}: a condition on GPUs and payers.
-- {figures}: the summed columns.
SELECT {tag} AS tag, {device} AS of_device, {payer} AS of_payer, {figures}
FROM {source} {joins}
WHERE {instant} >= $low AND {instant} < $high {condition}
GROUP BY ALL
