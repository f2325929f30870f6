-- The pod with a uid, as its node and the API server report it.
SELECT coalesce(p.namespace, s.namespace), coalesce(p.name, s.name), coalesce(nullif(s.workload, ''), p.workload, '')
FROM (SELECT * FROM pod WHERE cluster = $cluster AND uid = $uid) p
FULL JOIN (SELECT * FROM pod_seen WHERE cluster = $cluster AND uid = $uid) s ON p.uid = s.uid
