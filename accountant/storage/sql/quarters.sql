-- Sums of whole quarter-hours: of everything in [$low, $high), all GPUs together. {{at}}: what is told apart, the
-- quarter-hour or the spans of rows in it. {{figures}}: what is added up (accountant.storage.query.window_buckets). {{source}}: rows or sums;
-- {{of}}: by which time is told there. {{weight}}: of a row. {{only}}: a condition on rows.
SELECT {at}, payer, {figures}
FROM (SELECT *, {weight} AS weight FROM ({source}) e WHERE {of} >= $low AND {of} < $high {only})
GROUP BY ALL
