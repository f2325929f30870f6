-- Reported epochs of some jobs, each with its earliest report. incoming: cluster, namespace, job.
SELECT p.cluster, p.namespace, p.job, p.epoch, min(p.at_ms), arg_min(p.who, (p.at_ms, p.who))
FROM progress p JOIN incoming i ON i.cluster = p.cluster AND i.namespace = p.namespace AND i.job = p.job
GROUP BY ALL ORDER BY 1, 2, 3, 5, 4
