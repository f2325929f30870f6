-- A commit writes only rows. Sums are computed when an hour is folded. Hours that are not folded are summed from rows.

-- Hours whose rows are new or changed since the hours were last folded. `hour` and `quarter` have no sums of them.
CREATE TABLE unfolded (at_ms BIGINT NOT NULL);
INSERT INTO unfolded SELECT DISTINCT at_ms - at_ms % 3600000 FROM recent;
DELETE FROM hour WHERE at_ms IN (FROM unfolded);
DELETE FROM quarter WHERE at_ms - at_ms % 3600000 IN (FROM unfolded);
DROP VIEW quarterly;
DROP VIEW hourly;
DROP TABLE recent;

-- Hourly sums of all GPUs together, for queries that do not distinguish devices. It has a thousandth of the rows of `hour`.
CREATE TABLE hour_of_all AS
SELECT at_ms, payer,
       sum(busy_us)::BIGINT AS busy_us, sum(idle_us)::BIGINT AS idle_us, sum(unknown_us)::BIGINT AS unknown_us,
       sum(unheld_us)::BIGINT AS unheld_us, sum(down_us)::BIGINT AS down_us, sum(borrowed_us)::BIGINT AS borrowed_us,
       sum(unattributed_us)::BIGINT AS unattributed_us, sum(memory_mib_s)::BIGINT AS memory_mib_s,
       sum(energy_uj)::BIGINT AS energy_uj, sum(energy_blind_us)::BIGINT AS energy_blind_us
FROM hour GROUP BY ALL ORDER BY at_ms, payer;
