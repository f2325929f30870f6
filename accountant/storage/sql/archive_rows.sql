-- All rows above the archive's marks. Names are written out, so that a part can be read without any other file.
SELECT s.cluster, s.node, s.epoch, r.seq, r.set_seq, r.start_ms, r.end_ms, g.gpu_uuid, d.gpu_model,
       d.profile, d.gi, d.ci, d.compute, d.compute_of, d.memory_mib, d.memory_of_mib,
       h.kind, h.uid, h.namespace, h.name, h.container, r.payer != 0 AS pays,
       r.sharing, r.replicas, r.health, r.method, r.capacity_us, r.allocated_us, r.measured_busy_us,
       r.gaps, r.digest,
       {cells}
FROM received r
JOIN stream s ON s.id = r.stream
JOIN gpu g ON g.id = r.gpu
JOIN device d ON d.id = r.device
LEFT JOIN holder h ON h.id = r.holder
LEFT JOIN archive_mark a ON a.stream = r.stream
WHERE r.seq > coalesce(a.seq, 0) AND r.method != 'withdrawn'
ORDER BY r.start_ms, g.gpu_uuid, r.seq
