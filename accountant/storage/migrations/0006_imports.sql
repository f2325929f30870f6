-- Tenures from imports are marked: a GPU known only from an import is capacity up to its last record, and spans that agents
-- metered are not imported.
ALTER TABLE tenure ADD COLUMN imported BOOLEAN DEFAULT false;
