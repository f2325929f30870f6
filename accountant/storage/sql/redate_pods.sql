-- Dates observations of pods from after $limit to $now. Otherwise they would replace all later observations.
UPDATE pod SET observed_ms = $now, content = CAST(json_merge_patch(content::JSON, json_object('observed_ms', $now::BIGINT)) AS VARCHAR) WHERE observed_ms > $limit;
UPDATE pod_seen SET observed_ms = $now, content = CAST(json_merge_patch(content::JSON, json_object('observed_ms', $now::BIGINT)) AS VARCHAR) WHERE observed_ms > $limit;
-- Of the changes of a pod's exported labels, only the last one is kept, from the next quarter-hour (900,000 ms) on.
DELETE FROM exported_label e WHERE e.changed AND e.since_ms >= $now AND EXISTS (
    FROM exported_label l WHERE l.cluster = e.cluster AND l.uid = e.uid AND l.since_ms > greatest(e.since_ms, $limit)
);
UPDATE exported_label SET since_ms = ($now + 900000 - 1) // 900000 * 900000 - CASE WHEN changed THEN 0 ELSE 900000 END
WHERE since_ms > $limit
