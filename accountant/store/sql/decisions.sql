-- Decisions in [$start, $end), newest first; of one $kind, about one $subject, or about a $gang (namespace/name, behind
-- the kind of what it is), where that is not null.
SELECT content
FROM (SELECT content, at_ms, id, content ->> 'kind' AS kind, content ->> 'subject' AS subject FROM decision
      WHERE at_ms >= $start AND at_ms < $end)
WHERE ($kind IS NULL OR kind = $kind)
  AND ($subject IS NULL OR subject = $subject)
  AND ($gang IS NULL OR (contains(subject, '/') AND starts_with(substr(subject, instr(subject, '/') + 1), $gang)))
ORDER BY at_ms DESC, id DESC LIMIT $limit
