-- Epochs that jobs reported (accountant.ledger.protocols), in the order in which the reports came; never changed. Of several
-- about one epoch the earliest at_ms counts.
CREATE TABLE progress (
    cluster VARCHAR NOT NULL, namespace VARCHAR NOT NULL, job VARCHAR NOT NULL, epoch BIGINT NOT NULL,
    at_ms BIGINT NOT NULL, received_ms BIGINT NOT NULL, who VARCHAR NOT NULL
);
