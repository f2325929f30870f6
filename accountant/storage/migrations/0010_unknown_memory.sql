-- memory_blind_us: held time whose memory is unknown. Until now an unknown memory was kept as 0, so that of the records
-- and sums from before every held 0 is unknown.
DROP VIEW entry;
DROP VIEW present;
CREATE TABLE widened AS SELECT *, CASE WHEN memory_mib_s = 0 THEN busy_us + idle_us + unknown_us ELSE 0 END AS memory_blind_us FROM received;
DROP TABLE received;
ALTER TABLE widened RENAME TO received;
CREATE TABLE widened AS SELECT *, CASE WHEN memory_mib_s = 0 THEN busy_us + idle_us + unknown_us ELSE 0 END AS memory_blind_us FROM piece;
DROP TABLE piece;
ALTER TABLE widened RENAME TO piece;
CREATE TABLE widened AS SELECT *, CASE WHEN memory_mib_s = 0 THEN busy_us + idle_us + unknown_us ELSE 0 END AS memory_blind_us FROM quarter;
DROP TABLE quarter;
ALTER TABLE widened RENAME TO quarter;
CREATE TABLE widened AS SELECT *, CASE WHEN memory_mib_s = 0 THEN busy_us + idle_us + unknown_us ELSE 0 END AS memory_blind_us FROM hour;
DROP TABLE hour;
ALTER TABLE widened RENAME TO hour;
CREATE TABLE widened AS SELECT *, CASE WHEN memory_mib_s = 0 THEN busy_us + idle_us + unknown_us ELSE 0 END AS memory_blind_us FROM hour_of_all;
DROP TABLE hour_of_all;
ALTER TABLE widened RENAME TO hour_of_all;
CREATE TABLE widened AS SELECT *, CASE WHEN memory_mib_s = 0 THEN busy_us + idle_us + unknown_us ELSE 0 END AS memory_blind_us FROM day;
DROP TABLE day;
ALTER TABLE widened RENAME TO day;
-- What counts and is in this file: `entry`, wherever only hours are asked for that are not frozen.
CREATE VIEW present AS
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us, memory_blind_us
FROM received WHERE booked
UNION ALL
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us, memory_blind_us
FROM piece;
-- What counts: every row inside one quarter-hour, the rows of one GPU never overlapping.
CREATE VIEW entry AS FROM present;
