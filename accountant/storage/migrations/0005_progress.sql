-- Epochs that jobs reported (accountant.ledger.protocols), in the order of arrival, never changed. If an epoch has several
-- reports, the one with the earliest at_ms is valid.
CREATE TABLE progress (
    cluster VARCHAR NOT NULL, namespace VARCHAR NOT NULL, job VARCHAR NOT NULL, epoch BIGINT NOT NULL,
    at_ms BIGINT NOT NULL, received_ms BIGINT NOT NULL, who VARCHAR NOT NULL
);
