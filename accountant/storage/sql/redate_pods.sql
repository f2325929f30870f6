-- Observations of pods from after $limit, as of $now: else they would win over every later one.
UPDATE pod SET observed_ms = $now, content = CAST(json_merge_patch(content::JSON, json_object('observed_ms', $now::BIGINT)) AS VARCHAR) WHERE observed_ms > $limit;
UPDATE pod_seen SET observed_ms = $now, content = CAST(json_merge_patch(content::JSON, json_object('observed_ms', $now::BIGINT)) AS VARCHAR) WHERE observed_ms > $limit
