-- Holders that may be of some jobs, or bear some names, by what is told of them or of their pods. {pods}: pods_named.sql.
SELECT id FROM holder
WHERE list_contains($names, name) OR list_contains($names, uid) OR (cluster, uid) IN ({pods})
