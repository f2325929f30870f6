-- Epochs that ended in [$low, $high), each with its earliest report.
SELECT cluster, namespace, job, epoch, min(at_ms) AS at_ms, arg_min(who, (at_ms, who))
FROM progress GROUP BY cluster, namespace, job, epoch
HAVING min(progress.at_ms) >= $low AND min(progress.at_ms) < $high
ORDER BY 1, 2, 3, 5, 4
