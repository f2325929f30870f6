-- What people did to the books, in order, never changed: prices taken into force, months closed or reopened,
-- corrections, credits, invoices, policies. number: 1, 2, 3, … without a hole; each digest covers the one before.
CREATE TABLE act (
    number BIGINT NOT NULL, at_ms BIGINT NOT NULL, kind VARCHAR NOT NULL, subject VARCHAR NOT NULL,
    who VARCHAR NOT NULL, reason VARCHAR NOT NULL, content VARCHAR NOT NULL, digest VARCHAR NOT NULL
);
