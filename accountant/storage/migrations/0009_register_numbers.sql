-- Decisions and epochs are numbered in the order of arrival, like acts, so that each archive part contains only those that
-- are new since the preceding part.
CREATE TABLE numbered_decision AS
SELECT *, row_number() OVER (ORDER BY received_ms, at_ms, id)::BIGINT AS number FROM decision ORDER BY number;
DROP TABLE decision;
ALTER TABLE numbered_decision RENAME TO decision;
CREATE TABLE numbered_progress AS
SELECT *, row_number() OVER (ORDER BY received_ms, at_ms, job, epoch)::BIGINT AS number FROM progress ORDER BY number;
DROP TABLE progress;
ALTER TABLE numbered_progress RENAME TO progress;

-- The number up to which the archive contains each append-only table (act, decision, progress).
CREATE TABLE archive_register (name VARCHAR NOT NULL, number BIGINT NOT NULL);
