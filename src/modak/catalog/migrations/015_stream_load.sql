-- Stream Load: the order in which labels were accepted, and the folders that batches were staged into.
ALTER TABLE modak.load_labels
    ADD COLUMN accepted bigint,
    ADD COLUMN accepted_xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    ADD COLUMN pg_snapshot pg_snapshot,
    ADD COLUMN stage_id text,
    ADD COLUMN staged_files integer NOT NULL DEFAULT 0,
    ADD COLUMN rejected_rows bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN modak.load_labels.accepted IS 'From modak.load_order: of two staged rows with one key the later wins';
COMMENT ON COLUMN modak.load_labels.pg_snapshot IS 'Delta rows that it sees are older than the batch';

CREATE SEQUENCE modak.load_order CACHE 1;

-- Written before the first file: whatever a crash, a refusal or a failed adoption leaves behind is known by its folder.
CREATE TABLE modak.load_stages (
    stage_id text PRIMARY KEY,
    table_id bigint,
    label text NOT NULL,
    folder text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX load_labels_staged ON modak.load_labels (table_id, accepted) WHERE state = 'staged';
