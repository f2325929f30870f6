-- The content of the archive, which is outside this volume, and the rows that are only there.

-- Parts of the archive that this ledger wrote or replayed. low_ms, high_ms: the extent of its rows. rows: their number.
CREATE TABLE archive_part (
    number INTEGER NOT NULL, at_ms BIGINT NOT NULL, low_ms BIGINT NOT NULL, high_ms BIGINT NOT NULL, rows BIGINT NOT NULL
);
-- The highest contiguous number that is in the archive, per outbox.
CREATE TABLE archive_mark (stream INTEGER NOT NULL, seq BIGINT NOT NULL);
-- Hours whose rows are only in the archive. Their sums stay here.
CREATE TABLE frozen (at_ms BIGINT NOT NULL);
-- The counted rows in this file: equal to `entry` for hours that are not frozen.
CREATE VIEW present AS
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us
FROM received WHERE booked
UNION ALL
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us,
       down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us
FROM piece;
