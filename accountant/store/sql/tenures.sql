SELECT t.gpu, g.cluster, g.gpu_uuid, (SELECT max(d.gpu_model) FROM device d WHERE d.gpu = t.gpu), t.node,
       min(t.first_ms), max(t.last_ms)
FROM tenure t JOIN gpu g ON g.id = t.gpu
GROUP BY ALL
