-- The ledger. Times are UTC milliseconds, spans are half-open, and *_us are GPU-microseconds.
-- No table has an ART index: in DuckDB 1.5 an index costs more time than it saves, and its log is replayed badly.

CREATE TABLE stream (id INTEGER NOT NULL, cluster VARCHAR NOT NULL, node VARCHAR NOT NULL, epoch VARCHAR NOT NULL);
CREATE TABLE gpu (id INTEGER NOT NULL, cluster VARCHAR NOT NULL, gpu_uuid VARCHAR NOT NULL);

-- The hardware that a row names: the GPU, its node at that time, its model and its MIG instance.
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

-- Rows as received. Only `booked` ever changes: it is false if the set of the row was cut (see `piece`).
-- payer: the holder, or 0 if no holder pays for the time (unheld, unattributed or lost). The last columns of this and
-- further tables, from busy_us on, are accountant.core.gpu_time_accounts.CELLS.
CREATE TABLE received (
    stream INTEGER NOT NULL, seq BIGINT NOT NULL, set_seq BIGINT NOT NULL,
    start_ms BIGINT NOT NULL, end_ms BIGINT NOT NULL,
    gpu INTEGER NOT NULL, device INTEGER NOT NULL, holder INTEGER NOT NULL, payer INTEGER NOT NULL,
    sharing VARCHAR, replicas INTEGER, health VARCHAR NOT NULL, method VARCHAR NOT NULL,
    capacity_us BIGINT NOT NULL, allocated_us BIGINT NOT NULL, measured_busy_us BIGINT,
    gaps VARCHAR, digest UBIGINT NOT NULL, booked BOOLEAN NOT NULL,
    {columns_of_cells}
);

-- The remaining parts of sets that overlap a set of higher rank or cross a quarter-hour.
CREATE TABLE piece (
    stream INTEGER NOT NULL, seq BIGINT NOT NULL, set_seq BIGINT NOT NULL,
    start_ms BIGINT NOT NULL, end_ms BIGINT NOT NULL,
    gpu INTEGER NOT NULL, device INTEGER NOT NULL, payer INTEGER NOT NULL,
    {columns_of_cells}
);

-- The counted rows in this file: equal to `entry` for hours that are not frozen.
CREATE VIEW present AS {present};
-- The counted rows. Each lies inside one quarter-hour, and rows of one GPU do not overlap, except within a set.
CREATE VIEW entry AS FROM present;

-- Sums of `entry` by quarter-hour and by hour. A commit writes only rows; when an hour is over, its sums are folded into
-- `quarter` and `hour`, which have one row per key.
CREATE TABLE quarter (
    at_ms BIGINT NOT NULL, gpu INTEGER NOT NULL, device INTEGER NOT NULL, payer INTEGER NOT NULL,
    {columns_of_cells}
);
CREATE TABLE hour (
    at_ms BIGINT NOT NULL, gpu INTEGER NOT NULL, device INTEGER NOT NULL, payer INTEGER NOT NULL,
    {columns_of_cells}
);
-- Hours whose rows are new or changed since the hours were last folded. `hour` and `quarter` have no sums of them.
CREATE TABLE unfolded (at_ms BIGINT NOT NULL);
-- Hourly sums of all GPUs together, for queries that do not distinguish devices. It has a thousandth of the rows of `hour`.
CREATE TABLE hour_of_all (
    at_ms BIGINT NOT NULL, payer INTEGER NOT NULL,
    {columns_of_cells}
);
-- Sums of whole local days, which make queries over a month fast. Checkpoints fill them (accountant.storage.write.rollups).
-- at_ms is the start of the day.
CREATE TABLE day (
    at_ms BIGINT NOT NULL, gpu INTEGER NOT NULL, device INTEGER NOT NULL, payer INTEGER NOT NULL,
    {columns_of_cells}
);
-- The days that have sums: spans of whole quarter-hours that do not overlap, even if the time zone was changed.
CREATE TABLE kept_day (start_ms BIGINT NOT NULL, end_ms BIGINT NOT NULL);

-- The highest contiguous number that is committed, per outbox. The largest row of an outbox is valid.
CREATE TABLE mark (stream INTEGER NOT NULL, durable_seq BIGINT NOT NULL);
-- Numbers that will never arrive: the agent skipped them, or they were lost before they were sent.
CREATE TABLE hole (stream INTEGER NOT NULL, first_seq BIGINT NOT NULL, last_seq BIGINT NOT NULL, reason VARCHAR NOT NULL);
CREATE TABLE quarantine (
    stream INTEGER NOT NULL, seq BIGINT NOT NULL, digest UBIGINT NOT NULL, received_ms BIGINT NOT NULL,
    reason VARCHAR NOT NULL, detail VARCHAR NOT NULL, content VARCHAR NOT NULL
);

-- First booked start and newest booked end of a GPU on a node. The minimum and maximum of its rows are valid. Tenures from
-- imports are marked: a GPU known only from an import is capacity up to its last record, and spans that agents metered are
-- not imported.
CREATE TABLE tenure (
    gpu INTEGER NOT NULL, node VARCHAR NOT NULL, first_ms BIGINT NOT NULL, last_ms BIGINT NOT NULL,
    imported BOOLEAN NOT NULL
);
CREATE TABLE retired (gpu INTEGER NOT NULL, at_ms BIGINT NOT NULL);
-- The node that each GPU belongs to from from_ms until the next row of the GPU. at_ms: when the accountant stored the row.
-- who: the administrator who confirmed the move; '' if records showed it.
CREATE TABLE gpu_owner (
    cluster VARCHAR NOT NULL, gpu_uuid VARCHAR NOT NULL, node VARCHAR NOT NULL, from_ms BIGINT NOT NULL,
    at_ms BIGINT NOT NULL, who VARCHAR NOT NULL
);

-- The numbers of pod facts by outbox, and the newest facts of each pod as its node reports them.
CREATE TABLE pod_fact (stream INTEGER NOT NULL, seq BIGINT NOT NULL, digest UBIGINT NOT NULL);
CREATE TABLE pod (
    cluster VARCHAR NOT NULL, uid VARCHAR NOT NULL, namespace VARCHAR NOT NULL, name VARCHAR NOT NULL,
    workload VARCHAR NOT NULL, queue_ref VARCHAR NOT NULL, observed_ms BIGINT NOT NULL, content VARCHAR NOT NULL
);

-- The newest facts of each pod as the API server reports them, with all owners. The node reports only the nearest owner.
CREATE TABLE pod_seen (
    cluster VARCHAR NOT NULL, uid VARCHAR NOT NULL, namespace VARCHAR NOT NULL, name VARCHAR NOT NULL,
    workload VARCHAR NOT NULL, queue_ref VARCHAR NOT NULL, observed_ms BIGINT NOT NULL, content VARCHAR NOT NULL
);
-- Labels of a pod early in its life. Only the earliest row of a pod can determine the paying team.
CREATE TABLE pod_label (
    cluster VARCHAR NOT NULL, uid VARCHAR NOT NULL, observed_ms BIGINT NOT NULL, labels VARCHAR NOT NULL
);
-- The exported labels of a pod from an instant on (accountant.storage.write.pod_labels). changed: false for the first ones,
-- which also count before.
CREATE TABLE exported_label (
    cluster VARCHAR NOT NULL, uid VARCHAR NOT NULL, since_ms BIGINT NOT NULL, changed BOOLEAN NOT NULL,
    content VARCHAR NOT NULL
);
-- The node that first named a pod, in a row or in a fact. Only the records of this node count for the pod.
CREATE TABLE pod_node (cluster VARCHAR NOT NULL, uid VARCHAR NOT NULL, node VARCHAR NOT NULL, by_row BOOLEAN NOT NULL);

-- The present facts of nodes and namespaces, and earlier facts in `past`, each valid until its instant.
CREATE TABLE node (cluster VARCHAR NOT NULL, name VARCHAR NOT NULL, content VARCHAR NOT NULL);
CREATE TABLE namespace (cluster VARCHAR NOT NULL, name VARCHAR NOT NULL, content VARCHAR NOT NULL);
CREATE TABLE past (
    kind VARCHAR NOT NULL, cluster VARCHAR NOT NULL, name VARCHAR NOT NULL, until_ms BIGINT NOT NULL,
    content VARCHAR NOT NULL
);
-- Views of lists that callers saved, each by the name that its owner gave it. at_ms: when, and the number of the change: it
-- ascends. The newest removal leaves a row without an address, so that its change has a number too.
CREATE TABLE saved_view (
    owner VARCHAR NOT NULL, name VARCHAR NOT NULL, address VARCHAR NOT NULL, at_ms BIGINT NOT NULL
);
CREATE TABLE policy (version VARCHAR NOT NULL, effective_ms BIGINT NOT NULL, content VARCHAR NOT NULL);

-- Append-only registers. Their rows are numbered in the order of arrival, so that each archive part contains only those that
-- are new since the preceding part.
CREATE TABLE decision (
    id VARCHAR NOT NULL, at_ms BIGINT NOT NULL, received_ms BIGINT NOT NULL, content VARCHAR NOT NULL,
    number BIGINT NOT NULL
);
-- Epochs that jobs reported (accountant.ledger.protocols). If an epoch has several reports, the one with the earliest at_ms
-- is valid.
CREATE TABLE progress (
    cluster VARCHAR NOT NULL, namespace VARCHAR NOT NULL, job VARCHAR NOT NULL, epoch BIGINT NOT NULL,
    at_ms BIGINT NOT NULL, received_ms BIGINT NOT NULL, who VARCHAR NOT NULL, number BIGINT NOT NULL
);
-- Acts of administrators: new prices, months closed or reopened, corrections, credits, invoices and policies. Numbers count
-- from 1 without a gap. Each digest covers the preceding one.
CREATE TABLE act (
    number BIGINT NOT NULL, at_ms BIGINT NOT NULL, kind VARCHAR NOT NULL, subject VARCHAR NOT NULL,
    who VARCHAR NOT NULL, reason VARCHAR NOT NULL, content VARCHAR NOT NULL, digest VARCHAR NOT NULL
);

-- The content of the archive, which is outside this volume, and the rows that are only there.

-- Parts of the archive that this ledger wrote or replayed. low_ms, high_ms: the extent of its rows. rows: their number.
CREATE TABLE archive_part (
    number INTEGER NOT NULL, at_ms BIGINT NOT NULL, low_ms BIGINT NOT NULL, high_ms BIGINT NOT NULL, rows BIGINT NOT NULL
);
-- The highest contiguous number that is in the archive, per outbox.
CREATE TABLE archive_mark (stream INTEGER NOT NULL, seq BIGINT NOT NULL);
-- The number up to which the archive contains each append-only register.
CREATE TABLE archive_register (name VARCHAR NOT NULL, number BIGINT NOT NULL);
-- Hours whose rows are only in the archive. Their sums stay here.
CREATE TABLE frozen (at_ms BIGINT NOT NULL);
