-- Dates observations of pods from after $limit to $now. Otherwise they would replace all later observations.
UPDATE pod SET observed_ms = $now, content = CAST(json_merge_patch(content::JSON, json_object('observed_ms', $now::BIGINT)) AS VARCHAR) WHERE observed_ms > $limit;
UPDATE pod_seen SET observed_ms = $now, content = CAST(json_merge_patch(content::JSON, json_object('observed_ms', $now::BIGINT)) AS VARCHAR) WHERE observed_ms > $limit;
UPDATE exported_label SET since_ms = $now WHERE since_ms > $limit
