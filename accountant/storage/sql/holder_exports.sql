-- The exported labels of each holder's pod over time, which are asked for by $exported. incoming: id.
SELECT h.id, list({'since_ms': CASE WHEN e.changed THEN e.since_ms ELSE 0 END,
                   'texts': [e.content ->> ('$.labels."' || k || '"') FOR k IN $exported]} ORDER BY e.since_ms)
FROM holder h
JOIN incoming i ON h.id = i.id
JOIN exported_label e ON e.cluster = h.cluster AND e.uid = h.uid
GROUP BY h.id
