-- Acts of administrators in order, never changed: new prices, months closed or reopened, corrections, credits, invoices
-- and policies. Numbers count from 1 without a gap. Each digest covers the preceding one.
CREATE TABLE act (
    number BIGINT NOT NULL, at_ms BIGINT NOT NULL, kind VARCHAR NOT NULL, subject VARCHAR NOT NULL,
    who VARCHAR NOT NULL, reason VARCHAR NOT NULL, content VARCHAR NOT NULL, digest VARCHAR NOT NULL
);
