-- The queue that each holder's pod asked for. incoming: id.
SELECT h.id, h.cluster, h.uid, coalesce(p.queue_ref, '')
FROM holder h
JOIN incoming i ON h.id = i.id
LEFT JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
