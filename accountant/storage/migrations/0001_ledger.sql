-- The ledger, version 1. Times are UTC milliseconds, spans half-open; *_us are GPU-microseconds.
-- No ART index anywhere: on the 1.5 line they cost more than they give and replay badly.

CREATE TABLE stream (id INTEGER NOT NULL, cluster VARCHAR NOT NULL, node VARCHAR NOT NULL, epoch VARCHAR NOT NULL);
CREATE TABLE gpu (id INTEGER NOT NULL, cluster VARCHAR NOT NULL, gpu_uuid VARCHAR NOT NULL);

-- What a row says about the hardware it ran on: the GPU, its node then, its model, its MIG instance.
CREATE TABLE device (
    id INTEGER NOT NULL, gpu INTEGER NOT NULL, node VARCHAR NOT NULL, gpu_model VARCHAR NOT NULL,
    profile VARCHAR NOT NULL, gi INTEGER NOT NULL, ci INTEGER NOT NULL,
    compute INTEGER NOT NULL, compute_of INTEGER NOT NULL, memory_mib BIGINT NOT NULL, memory_of_mib BIGINT NOT NULL
);

-- Holder 0 stands for no holder.
CREATE TABLE holder (
    id INTEGER NOT NULL, cluster VARCHAR NOT NULL, kind VARCHAR NOT NULL, uid VARCHAR NOT NULL,
    namespace VARCHAR NOT NULL, name VARCHAR NOT NULL, container VARCHAR NOT NULL
);

-- Rows as received, for ever unchanged but for `booked`: false where the set was cut (see `piece`).
-- payer: the holder, or 0 where no holder pays (unheld, unattributed, lost).
CREATE TABLE received (
    stream INTEGER NOT NULL, seq BIGINT NOT NULL, set_seq BIGINT NOT NULL,
    start_ms BIGINT NOT NULL, end_ms BIGINT NOT NULL,
    gpu INTEGER NOT NULL, device INTEGER NOT NULL, holder INTEGER NOT NULL, payer INTEGER NOT NULL,
    sharing VARCHAR, replicas INTEGER, health VARCHAR NOT NULL, method VARCHAR NOT NULL,
    capacity_us BIGINT NOT NULL, allocated_us BIGINT NOT NULL, measured_busy_us BIGINT,
    sm_active_us BIGINT, tensor_active_us BIGINT, gaps VARCHAR, digest UBIGINT NOT NULL, booked BOOLEAN NOT NULL,
    busy_us BIGINT NOT NULL, idle_us BIGINT NOT NULL, unknown_us BIGINT NOT NULL, unheld_us BIGINT NOT NULL,
    down_us BIGINT NOT NULL, borrowed_us BIGINT NOT NULL, unattributed_us BIGINT NOT NULL,
    memory_mib_s BIGINT NOT NULL, energy_uj BIGINT NOT NULL, energy_blind_us BIGINT NOT NULL
);

-- What is kept of sets that overlap a better one or cross a quarter-hour.
CREATE TABLE piece (
    stream INTEGER NOT NULL, seq BIGINT NOT NULL, set_seq BIGINT NOT NULL,
    start_ms BIGINT NOT NULL, end_ms BIGINT NOT NULL,
    gpu INTEGER NOT NULL, device INTEGER NOT NULL, payer INTEGER NOT NULL,
    busy_us BIGINT NOT NULL, idle_us BIGINT NOT NULL, unknown_us BIGINT NOT NULL, unheld_us BIGINT NOT NULL,
    down_us BIGINT NOT NULL, borrowed_us BIGINT NOT NULL, unattributed_us BIGINT NOT NULL,
    memory_mib_s BIGINT NOT NULL, energy_uj BIGINT NOT NULL, energy_blind_us BIGINT NOT NULL
);

-- What counts: every row inside one quarter-hour, the rows of one GPU never overlapping.
CREATE VIEW entry AS
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us
FROM received WHERE booked
UNION ALL
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us
FROM piece;

-- Sums of `entry` per quarter-hour, kept in the transaction that changes it; a key may stand in several
-- rows. Once their hour is over they are folded into `quarter` and `hour`, which have one row per key.
CREATE TABLE recent (
    at_ms BIGINT NOT NULL, gpu INTEGER NOT NULL, device INTEGER NOT NULL, payer INTEGER NOT NULL,
    busy_us BIGINT NOT NULL, idle_us BIGINT NOT NULL, unknown_us BIGINT NOT NULL, unheld_us BIGINT NOT NULL,
    down_us BIGINT NOT NULL, borrowed_us BIGINT NOT NULL, unattributed_us BIGINT NOT NULL,
    memory_mib_s BIGINT NOT NULL, energy_uj BIGINT NOT NULL, energy_blind_us BIGINT NOT NULL
);
CREATE TABLE quarter AS FROM recent;
CREATE TABLE hour AS FROM recent;

-- The sums, folded or not: a key may stand in several rows, always sum.
CREATE VIEW quarterly AS FROM quarter UNION ALL FROM recent;
CREATE VIEW hourly AS
FROM hour
UNION ALL
SELECT at_ms - at_ms % 3600000, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us
FROM recent;

-- The highest contiguous number that is committed, per outbox: the largest of its rows.
CREATE TABLE mark (stream INTEGER NOT NULL, durable_seq BIGINT NOT NULL);
-- Numbers that will never come: declared `skipped` by the agent, or `lost` before they were sent.
CREATE TABLE hole (stream INTEGER NOT NULL, first_seq BIGINT NOT NULL, last_seq BIGINT NOT NULL, reason VARCHAR NOT NULL);
CREATE TABLE quarantine (
    stream INTEGER NOT NULL, seq BIGINT NOT NULL, digest UBIGINT NOT NULL, received_ms BIGINT NOT NULL,
    reason VARCHAR NOT NULL, detail VARCHAR NOT NULL, content VARCHAR NOT NULL
);

-- First booked start and newest booked end of a GPU on a node: the extremes of its rows.
CREATE TABLE tenure (gpu INTEGER NOT NULL, node VARCHAR NOT NULL, first_ms BIGINT NOT NULL, last_ms BIGINT NOT NULL);
CREATE TABLE retired (gpu INTEGER NOT NULL, at_ms BIGINT NOT NULL);

-- Pods: facts as numbered by their outbox, and the newest of each.
CREATE TABLE pod_fact (stream INTEGER NOT NULL, seq BIGINT NOT NULL, digest UBIGINT NOT NULL);
CREATE TABLE pod (
    cluster VARCHAR NOT NULL, uid VARCHAR NOT NULL, namespace VARCHAR NOT NULL, name VARCHAR NOT NULL,
    workload VARCHAR NOT NULL, queue_ref VARCHAR NOT NULL, observed_ms BIGINT NOT NULL, content VARCHAR NOT NULL
);

-- The same as the API server shows it: it knows the whole chain of owners, the node only the nearest.
CREATE TABLE pod_seen AS FROM pod;
-- Labels of a pod as first seen early in its life, the only ones that may say who pays: the earliest row counts.
CREATE TABLE pod_label (
    cluster VARCHAR NOT NULL, uid VARCHAR NOT NULL, observed_ms BIGINT NOT NULL, labels VARCHAR NOT NULL
);

-- Nodes and namespaces as last read, and what they were before: a row of `past` holds until its instant.
CREATE TABLE node (cluster VARCHAR NOT NULL, name VARCHAR NOT NULL, content VARCHAR NOT NULL);
CREATE TABLE namespace (cluster VARCHAR NOT NULL, name VARCHAR NOT NULL, content VARCHAR NOT NULL);
CREATE TABLE past (
    kind VARCHAR NOT NULL, cluster VARCHAR NOT NULL, name VARCHAR NOT NULL, until_ms BIGINT NOT NULL,
    content VARCHAR NOT NULL
);
CREATE TABLE policy (version VARCHAR NOT NULL, effective_ms BIGINT NOT NULL, content VARCHAR NOT NULL);
CREATE TABLE decision (id VARCHAR NOT NULL, at_ms BIGINT NOT NULL, received_ms BIGINT NOT NULL, content VARCHAR NOT NULL);
