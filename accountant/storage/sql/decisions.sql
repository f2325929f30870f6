-- Decisions in [$start, $end), newest first. Null parameters do not filter: $kind and $subject select one kind and one
-- subject; $gang selects subjects whose namespace/name, after the kind, begins with one of its elements; $cluster
-- selects decisions of this cluster and those without a cluster.
-- $before selects, of the last millisecond, the decisions with a lower key.
SELECT content
FROM (SELECT content, at_ms, id, content ->> 'kind' AS kind, content ->> 'subject' AS subject,
             content ->> 'cluster' AS cluster
      FROM decision
      WHERE at_ms >= $start AND at_ms < $end AND ($before IS NULL OR at_ms < $end - 1 OR id < $before))
WHERE ($kind IS NULL OR kind = $kind)
  AND ($subject IS NULL OR subject = $subject)
  AND ($cluster IS NULL OR coalesce(cluster, '') IN ('', $cluster))
  AND ($gang IS NULL OR (contains(subject, '/') AND len(list_filter(
    $gang::VARCHAR[], lambda name: starts_with(substr(subject, instr(subject, '/') + 1), name))) > 0))
ORDER BY at_ms DESC, id DESC LIMIT $limit
