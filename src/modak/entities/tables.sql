CREATE TABLE IF NOT EXISTS {main} (
    ltbase_schema_id smallint NOT NULL,
    ltbase_row_id uuid NOT NULL,
    {slots},
    ltbase_created_at bigint NOT NULL,
    ltbase_updated_at bigint NOT NULL,
    ltbase_deleted_at bigint,
    PRIMARY KEY (ltbase_schema_id, ltbase_row_id)
);
CREATE TABLE IF NOT EXISTS {eav} (
    schema_id smallint NOT NULL,
    row_id uuid NOT NULL,
    attr_id smallint NOT NULL,
    array_indices text NOT NULL DEFAULT '',
    value_text text,
    value_numeric numeric,
    PRIMARY KEY (schema_id, row_id, attr_id, array_indices)
);
CREATE TABLE IF NOT EXISTS {log} (
    schema_id smallint NOT NULL,
    row_id uuid NOT NULL,
    flushed_at bigint NOT NULL DEFAULT 0,
    changed_at bigint NOT NULL,
    deleted_at bigint,
    PRIMARY KEY (schema_id, row_id, flushed_at)
);
CREATE INDEX IF NOT EXISTS {index} ON {log} (schema_id, changed_at, row_id) WHERE flushed_at = 0;
CREATE TABLE IF NOT EXISTS {quarantine} (
    schema_id smallint NOT NULL,
    row_id uuid NOT NULL,
    version text NOT NULL,
    registry text NOT NULL,
    reason text NOT NULL,
    noticed_at bigint NOT NULL,
    PRIMARY KEY (schema_id, row_id)
);
