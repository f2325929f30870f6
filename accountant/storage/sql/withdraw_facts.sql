-- Removes what an import said about the holders of its withdrawn rows: of jobs, which only imports describe, and of pods
-- that hold nothing else. Of jobs whose time agents metered, what it said for a chunk of the span. $cluster: of the
-- import; $queues: what the queues of its jobs begin with, if it is a batch system's: their numbers no agent describes.
CREATE OR REPLACE TEMP TABLE undescribed AS
SELECT DISTINCT h.uid FROM withdrawn w JOIN holder h ON h.id = w.holder
WHERE h.kind = 'slurm' OR NOT EXISTS (
    SELECT 1 FROM received r JOIN holder o ON o.id = r.holder
    WHERE o.cluster = h.cluster AND o.uid = h.uid AND r.method != 'withdrawn'
)
UNION SELECT uid FROM pod
WHERE cluster = $cluster AND observed_ms > $start AND observed_ms <= $end AND starts_with(queue_ref, $queues)
  AND starts_with(workload, 'SlurmJob/');
DELETE FROM pod WHERE cluster = $cluster AND uid IN (FROM undescribed);
DELETE FROM pod_label WHERE cluster = $cluster AND uid IN (FROM undescribed);
DELETE FROM exported_label WHERE cluster = $cluster AND uid IN (FROM undescribed);
DELETE FROM pod_node WHERE cluster = $cluster AND uid IN (FROM undescribed)
