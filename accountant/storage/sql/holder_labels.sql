-- The labels that a holder's pod had when it was first seen. incoming: id.
SELECT h.id, arg_min(l.labels, (l.observed_ms, l.labels))
FROM holder h
JOIN incoming i ON h.id = i.id
JOIN pod_label l ON l.cluster = h.cluster AND l.uid = h.uid
GROUP BY h.id
