-- `CREATE TABLE AS` in earlier migrations dropped the constraints, so they are added again. A column can be null only if a
-- record can lack its value.
DROP VIEW entry;
DROP VIEW present;
CREATE TABLE constrained (
    stream INTEGER NOT NULL, seq BIGINT NOT NULL, set_seq BIGINT NOT NULL, start_ms BIGINT NOT NULL,
    end_ms BIGINT NOT NULL, gpu INTEGER NOT NULL, device INTEGER NOT NULL, holder INTEGER NOT NULL,
    payer INTEGER NOT NULL, sharing VARCHAR, replicas INTEGER, health VARCHAR NOT NULL, method VARCHAR NOT NULL,
    capacity_us BIGINT NOT NULL, allocated_us BIGINT NOT NULL, measured_busy_us BIGINT, sm_active_us BIGINT,
    tensor_active_us BIGINT, gaps VARCHAR, digest UBIGINT NOT NULL, booked BOOLEAN NOT NULL,
    busy_us BIGINT NOT NULL, idle_us BIGINT NOT NULL, unknown_us BIGINT NOT NULL, unheld_us BIGINT NOT NULL,
    down_us BIGINT NOT NULL, borrowed_us BIGINT NOT NULL, unattributed_us BIGINT NOT NULL,
    memory_mib_s BIGINT NOT NULL, energy_uj BIGINT NOT NULL, energy_blind_us BIGINT NOT NULL,
    memory_blind_us BIGINT NOT NULL
);
INSERT INTO constrained FROM received;
DROP TABLE received;
ALTER TABLE constrained RENAME TO received;
CREATE TABLE constrained (
    stream INTEGER NOT NULL, seq BIGINT NOT NULL, set_seq BIGINT NOT NULL, start_ms BIGINT NOT NULL,
    end_ms BIGINT NOT NULL, gpu INTEGER NOT NULL, device INTEGER NOT NULL, payer INTEGER NOT NULL,
    busy_us BIGINT NOT NULL, idle_us BIGINT NOT NULL, unknown_us BIGINT NOT NULL, unheld_us BIGINT NOT NULL,
    down_us BIGINT NOT NULL, borrowed_us BIGINT NOT NULL, unattributed_us BIGINT NOT NULL,
    memory_mib_s BIGINT NOT NULL, energy_uj BIGINT NOT NULL, energy_blind_us BIGINT NOT NULL,
    memory_blind_us BIGINT NOT NULL
);
INSERT INTO constrained FROM piece;
DROP TABLE piece;
ALTER TABLE constrained RENAME TO piece;
CREATE TABLE constrained (
    at_ms BIGINT NOT NULL, gpu INTEGER NOT NULL, device INTEGER NOT NULL, payer INTEGER NOT NULL,
    busy_us BIGINT NOT NULL, idle_us BIGINT NOT NULL, unknown_us BIGINT NOT NULL, unheld_us BIGINT NOT NULL,
    down_us BIGINT NOT NULL, borrowed_us BIGINT NOT NULL, unattributed_us BIGINT NOT NULL,
    memory_mib_s BIGINT NOT NULL, energy_uj BIGINT NOT NULL, energy_blind_us BIGINT NOT NULL,
    memory_blind_us BIGINT NOT NULL
);
INSERT INTO constrained FROM quarter;
DROP TABLE quarter;
ALTER TABLE constrained RENAME TO quarter;
CREATE TABLE constrained (
    at_ms BIGINT NOT NULL, gpu INTEGER NOT NULL, device INTEGER NOT NULL, payer INTEGER NOT NULL,
    busy_us BIGINT NOT NULL, idle_us BIGINT NOT NULL, unknown_us BIGINT NOT NULL, unheld_us BIGINT NOT NULL,
    down_us BIGINT NOT NULL, borrowed_us BIGINT NOT NULL, unattributed_us BIGINT NOT NULL,
    memory_mib_s BIGINT NOT NULL, energy_uj BIGINT NOT NULL, energy_blind_us BIGINT NOT NULL,
    memory_blind_us BIGINT NOT NULL
);
INSERT INTO constrained FROM hour;
DROP TABLE hour;
ALTER TABLE constrained RENAME TO hour;
CREATE TABLE constrained (
    at_ms BIGINT NOT NULL, payer INTEGER NOT NULL, busy_us BIGINT NOT NULL, idle_us BIGINT NOT NULL,
    unknown_us BIGINT NOT NULL, unheld_us BIGINT NOT NULL, down_us BIGINT NOT NULL, borrowed_us BIGINT NOT NULL,
    unattributed_us BIGINT NOT NULL, memory_mib_s BIGINT NOT NULL, energy_uj BIGINT NOT NULL,
    energy_blind_us BIGINT NOT NULL, memory_blind_us BIGINT NOT NULL
);
INSERT INTO constrained FROM hour_of_all;
DROP TABLE hour_of_all;
ALTER TABLE constrained RENAME TO hour_of_all;
CREATE TABLE constrained (
    at_ms BIGINT NOT NULL, gpu INTEGER NOT NULL, device INTEGER NOT NULL, payer INTEGER NOT NULL,
    busy_us BIGINT NOT NULL, idle_us BIGINT NOT NULL, unknown_us BIGINT NOT NULL, unheld_us BIGINT NOT NULL,
    down_us BIGINT NOT NULL, borrowed_us BIGINT NOT NULL, unattributed_us BIGINT NOT NULL,
    memory_mib_s BIGINT NOT NULL, energy_uj BIGINT NOT NULL, energy_blind_us BIGINT NOT NULL,
    memory_blind_us BIGINT NOT NULL
);
INSERT INTO constrained FROM day;
DROP TABLE day;
ALTER TABLE constrained RENAME TO day;
CREATE TABLE constrained (
    cluster VARCHAR NOT NULL, uid VARCHAR NOT NULL, namespace VARCHAR NOT NULL, name VARCHAR NOT NULL,
    workload VARCHAR NOT NULL, queue_ref VARCHAR NOT NULL, observed_ms BIGINT NOT NULL, content VARCHAR NOT NULL
);
INSERT INTO constrained FROM pod_seen;
DROP TABLE pod_seen;
ALTER TABLE constrained RENAME TO pod_seen;
CREATE TABLE constrained (
    id VARCHAR NOT NULL, at_ms BIGINT NOT NULL, received_ms BIGINT NOT NULL, content VARCHAR NOT NULL,
    number BIGINT NOT NULL
);
INSERT INTO constrained FROM decision;
DROP TABLE decision;
ALTER TABLE constrained RENAME TO decision;
CREATE TABLE constrained (
    cluster VARCHAR NOT NULL, namespace VARCHAR NOT NULL, job VARCHAR NOT NULL, epoch BIGINT NOT NULL,
    at_ms BIGINT NOT NULL, received_ms BIGINT NOT NULL, who VARCHAR NOT NULL, number BIGINT NOT NULL
);
INSERT INTO constrained FROM progress;
DROP TABLE progress;
ALTER TABLE constrained RENAME TO progress;
CREATE TABLE constrained (
    gpu INTEGER NOT NULL, node VARCHAR NOT NULL, first_ms BIGINT NOT NULL, last_ms BIGINT NOT NULL,
    imported BOOLEAN NOT NULL
);
INSERT INTO constrained FROM tenure;
DROP TABLE tenure;
ALTER TABLE constrained RENAME TO tenure;
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
