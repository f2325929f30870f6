-- Reported epochs, each with its earliest report. {only}: of which jobs. {ended}: a condition on the end of an epoch.
SELECT p.cluster, p.namespace, p.job, p.epoch, min(p.at_ms), arg_min(p.who, (p.at_ms, p.who))
FROM progress p {only}
GROUP BY ALL {ended} ORDER BY 1, 2, 3, 5, 4
