-- The intervals of some outboxes in {rows}, a query for archived rows. incoming: cluster, node, epoch.
SELECT cluster, node, epoch, set_seq, digest, seq, start_ms, end_ms, gpu_uuid, gpu_model,
       profile, gi, ci, compute, compute_of, memory_mib, memory_of_mib, kind, uid, namespace, name, container,
       sharing, replicas, health, method, capacity_us, allocated_us, measured_busy_us, gaps,
       {measures_if_known}
FROM ({rows}) WHERE (cluster, node, epoch) IN (SELECT (cluster, node, epoch) FROM incoming)
ORDER BY start_ms, cluster, node, epoch, set_seq, seq
