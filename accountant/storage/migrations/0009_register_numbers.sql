-- Decisions and epochs are numbered in the order in which they came, as acts are, so that a part of the archive holds
-- only those above the part before.
CREATE TABLE numbered_decision AS
SELECT *, row_number() OVER (ORDER BY received_ms, at_ms, id)::BIGINT AS number FROM decision ORDER BY number;
DROP TABLE decision;
ALTER TABLE numbered_decision RENAME TO decision;
CREATE TABLE numbered_progress AS
SELECT *, row_number() OVER (ORDER BY received_ms, at_ms, job, epoch)::BIGINT AS number FROM progress ORDER BY number;
DROP TABLE progress;
ALTER TABLE numbered_progress RENAME TO progress;

-- By register that only grows (act, decision, progress), the number up to which the archive has it.
CREATE TABLE archive_register (name VARCHAR NOT NULL, number BIGINT NOT NULL);
