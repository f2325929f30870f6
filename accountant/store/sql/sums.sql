-- Sums of what counts in [$low, $high), told apart as {{tag}}, {{gpu}}, {{device}} and {{payer}} say (accountant.store.scan).
-- {{source}}: a table of sums or of rows as e, joined with what is asked for where that is not a stretch: incoming as i,
-- of tag, gpu (0 = every) and at_ms or start_ms and end_ms. {{joins}}: kinds of devices as k, classes of payers as p.
-- {{of}}: the column by which time is told. {{only}}: a condition on GPUs.
SELECT {tag}, {gpu}, {device}, {payer},
       sum(busy_us)::BIGINT, sum(idle_us)::BIGINT, sum(unknown_us)::BIGINT, sum(unheld_us)::BIGINT,
       sum(down_us)::BIGINT, sum(borrowed_us)::BIGINT, sum(unattributed_us)::BIGINT,
       sum(memory_mib_s)::BIGINT, sum(energy_uj), sum(energy_blind_us)::BIGINT
FROM {source} {joins}
WHERE {of} >= $low AND {of} < $high {only}
GROUP BY ALL
