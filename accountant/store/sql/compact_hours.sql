-- One row per key in the hours of `incoming` (tag, gpu, at_ms).
CREATE OR REPLACE TEMP TABLE compacted AS
SELECT at_ms, gpu, device, payer,
       sum(busy_us), sum(idle_us), sum(unknown_us), sum(unheld_us), sum(down_us), sum(borrowed_us), sum(unattributed_us),
       sum(memory_mib_s), sum(energy_uj), sum(energy_blind_us)
FROM hour WHERE at_ms IN (SELECT at_ms FROM incoming)
GROUP BY ALL ORDER BY at_ms, gpu, device, payer;
DELETE FROM hour WHERE at_ms IN (SELECT at_ms FROM incoming);
INSERT INTO hour FROM compacted;
DROP TABLE compacted;
