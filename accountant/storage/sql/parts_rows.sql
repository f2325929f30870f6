-- The archive's rows. {files}: a list of the parts' files. Parts of earlier releases stored unknown memory as 0.
SELECT * REPLACE (coalesce(
    memory_blind_us, CASE WHEN memory_mib_s = 0 THEN busy_us + idle_us + unknown_us ELSE 0 END
) AS memory_blind_us)
FROM (
    FROM read_parquet({files}, union_by_name = true)
    UNION ALL BY NAME
    SELECT NULL::BIGINT AS memory_blind_us WHERE false
)
