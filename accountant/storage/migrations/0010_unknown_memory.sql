-- memory_blind_us: held time whose memory is unknown. Earlier releases stored unknown memory as 0, so in records and sums of
-- earlier releases, 0 for held time means unknown.
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
-- The counted rows in this file: equal to `entry` for hours that are not frozen.
CREATE VIEW present AS
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us, memory_blind_us
FROM received WHERE booked
UNION ALL
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us, memory_blind_us
FROM piece;
-- The counted rows. Each lies inside one quarter-hour, and rows of one GPU do not overlap, except within a set.
CREATE VIEW entry AS FROM present;
