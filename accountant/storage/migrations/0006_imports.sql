-- Tenures that an import told of stand apart from those that agents metered: an imported GPU is capacity up to its
-- last record, and what agents metered is never imported.
ALTER TABLE tenure ADD COLUMN imported BOOLEAN DEFAULT false;
