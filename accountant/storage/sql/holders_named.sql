-- Holders that may belong to some jobs or have some names, according to reports of them or of their pods. {pods}:
-- pods_named.sql.
SELECT id FROM holder
WHERE list_contains($names, name) OR list_contains($names, uid) OR (cluster, uid) IN ({pods})
