-- Replaces the exported labels of the pods of an archive part ($1) by those of the part, except where the ledger has seen
-- the pod later than the part.
DELETE FROM exported_label WHERE (cluster, uid) IN (
    SELECT (p.cluster, p.uid)
    FROM read_parquet($1) p
    LEFT JOIN (FROM pod UNION ALL FROM pod_seen) k ON k.cluster = p.cluster AND k.uid = p.uid
    WHERE p.source != 'label'
    GROUP BY p.cluster, p.uid
    HAVING bool_or(p.source = 'exported')
       AND coalesce(max(k.observed_ms), 0) <= coalesce(max(p.observed_ms) FILTER (p.source != 'exported'), 0)
);
INSERT INTO exported_label
SELECT cluster, uid, observed_ms, row_number() OVER (PARTITION BY cluster, uid ORDER BY observed_ms) > 1, content
FROM read_parquet($1)
WHERE source = 'exported' AND (cluster, uid) NOT IN (SELECT (cluster, uid) FROM exported_label)
