-- What lies in the archive, off this volume, and what only lies there.

-- Parts of the archive that this ledger wrote or took over. low_ms, high_ms: around the rows in it; rows: how many.
CREATE TABLE archive_part (
    number INTEGER NOT NULL, at_ms BIGINT NOT NULL, low_ms BIGINT NOT NULL, high_ms BIGINT NOT NULL, rows BIGINT NOT NULL
);
-- The highest contiguous number that lies in the archive, per outbox.
CREATE TABLE archive_mark (stream INTEGER NOT NULL, seq BIGINT NOT NULL);
-- Hours whose rows are in the archive alone; their sums stay here.
CREATE TABLE frozen (at_ms BIGINT NOT NULL);
-- What counts and is in this file: `entry`, wherever only hours are asked for that are not frozen.
CREATE VIEW present AS
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us
FROM received WHERE booked
UNION ALL
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us
FROM piece;
