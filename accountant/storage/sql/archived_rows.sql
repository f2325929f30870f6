-- The archive's rows with the ids of this ledger file, in the columns of `received`. {rows}: a
-- query for the rows in the files of parts, see accountant.storage.record_archive.
SELECT s.id AS stream, p.seq, p.set_seq, p.start_ms, p.end_ms, g.id AS gpu, d.id AS device,
       coalesce(h.id, 0) AS holder, CASE WHEN p.pays THEN h.id ELSE 0 END AS payer,
       p.sharing, p.replicas, p.health, p.method, p.capacity_us, p.allocated_us, p.measured_busy_us,
       p.gaps, p.digest, true AS booked,
       {cells_or_unknown}
FROM ({rows}) p
JOIN stream s ON s.cluster = p.cluster AND s.node = p.node AND s.epoch = p.epoch
JOIN gpu g ON g.cluster = p.cluster AND g.gpu_uuid = p.gpu_uuid
JOIN device d ON d.gpu = g.id AND d.node = p.node AND d.gpu_model = p.gpu_model AND d.profile = p.profile
     AND d.gi = p.gi AND d.ci = p.ci AND d.compute = p.compute AND d.compute_of = p.compute_of
     AND d.memory_mib = p.memory_mib AND d.memory_of_mib = p.memory_of_mib
LEFT JOIN holder h ON h.cluster = p.cluster AND h.kind = p.kind AND h.uid = p.uid AND h.namespace = p.namespace
     AND h.name = p.name AND h.container = p.container
