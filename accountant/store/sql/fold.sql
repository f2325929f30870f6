-- What is recent in the hours of `incoming` (tag, gpu, at_ms), folded: one row per key.
CREATE OR REPLACE TEMP TABLE folded AS
SELECT at_ms, gpu, device, payer,
       sum(busy_us) AS busy_us, sum(idle_us) AS idle_us, sum(unknown_us) AS unknown_us, sum(unheld_us) AS unheld_us,
       sum(down_us) AS down_us, sum(borrowed_us) AS borrowed_us, sum(unattributed_us) AS unattributed_us,
       sum(memory_mib_s) AS memory_mib_s, sum(energy_uj) AS energy_uj, sum(energy_blind_us) AS energy_blind_us
FROM quarterly WHERE at_ms - at_ms % 3600000 IN (SELECT at_ms FROM incoming)
GROUP BY ALL ORDER BY at_ms, gpu, device, payer;
DELETE FROM recent WHERE at_ms - at_ms % 3600000 IN (SELECT at_ms FROM incoming);
DELETE FROM quarter WHERE at_ms - at_ms % 3600000 IN (SELECT at_ms FROM incoming);
DELETE FROM hour WHERE at_ms IN (SELECT at_ms FROM incoming);
INSERT INTO quarter FROM folded;
INSERT INTO hour
SELECT at_ms - at_ms % 3600000 AS over, gpu, device, payer,
       sum(busy_us), sum(idle_us), sum(unknown_us), sum(unheld_us), sum(down_us), sum(borrowed_us), sum(unattributed_us),
       sum(memory_mib_s), sum(energy_uj), sum(energy_blind_us)
FROM folded GROUP BY ALL ORDER BY over, gpu, device, payer;
DROP TABLE folded;
