-- The reported epochs of the jobs with these paths, which may be of several namespaces, once per report. A join with the
-- jobs takes four times as long.
SELECT cluster, namespace, job, epoch, at_ms FROM progress WHERE job IN (SELECT unnest($jobs))
