-- The number of reported epochs of each of some jobs. incoming: cluster, namespace, job.
SELECT p.cluster, p.namespace, p.job, count(DISTINCT p.epoch)
FROM progress p JOIN incoming i ON i.cluster = p.cluster AND i.namespace = p.namespace AND i.job = p.job
GROUP BY ALL
