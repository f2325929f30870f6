-- Removes what an import said about the holders of its withdrawn rows: of jobs, which only imports describe, and of pods
-- that hold nothing else. $cluster: of the import.
CREATE OR REPLACE TEMP TABLE undescribed AS
SELECT DISTINCT h.uid FROM withdrawn w JOIN holder h ON h.id = w.holder
WHERE h.kind = 'slurm' OR NOT EXISTS (
    SELECT 1 FROM received r JOIN holder o ON o.id = r.holder
    WHERE o.cluster = h.cluster AND o.uid = h.uid AND r.method != 'withdrawn'
);
DELETE FROM pod WHERE cluster = $cluster AND uid IN (FROM undescribed);
DELETE FROM pod_label WHERE cluster = $cluster AND uid IN (FROM undescribed);
DELETE FROM pod_node WHERE cluster = $cluster AND uid IN (FROM undescribed)
