-- A superset of the holders that belong to some jobs or have some names, according to reports of them or of their pods.
SELECT id FROM holder
WHERE list_contains($names, name) OR list_contains($names, uid) OR (cluster, uid) IN ({pods_named})
