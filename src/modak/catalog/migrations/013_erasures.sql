-- Rows that must be gone from every retained snapshot: what was asked, how far it is, and the evidence.

CREATE TABLE modak.erasures (
    erasure_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    digest text NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    requested_by text NOT NULL DEFAULT session_user,
    below_sequence bigint,
    finished_at timestamptz,
    evidence jsonb NOT NULL DEFAULT '{}'
);
COMMENT ON COLUMN modak.erasures.digest IS 'SHA-256 of the condition: the condition itself may name the person';
COMMENT ON COLUMN modak.erasures.below_sequence IS 'Snapshots below this sequence number may still show the rows and have to expire';
CREATE INDEX erasures_open ON modak.erasures (table_id) WHERE finished_at IS NULL;
