-- What `ingest` has taken in: the same version of the same source is never taken in twice.
CREATE TABLE modak.ingested (
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    source text NOT NULL,
    version text NOT NULL,
    op_id text NOT NULL,
    row_count bigint NOT NULL,
    ingested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (table_id, source, version)
);
COMMENT ON TABLE modak.ingested IS 'Sources by path and version (etag, or inode and time) that are in the lake';
