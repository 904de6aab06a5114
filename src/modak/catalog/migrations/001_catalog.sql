-- State of every registered table: configuration, cut-line, partitions, delta, journal, leadership.
-- Error states of our own: MDK01 partition step, MDK02 operation step, MDK03 line moved back, MDK04 default profile.

GRANT USAGE ON SCHEMA modak TO PUBLIC;

CREATE TABLE modak.storage_profiles (
    profile_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE CHECK (name <> ''),
    warehouse text CHECK (warehouse <> ''),
    format text NOT NULL DEFAULT 'iceberg',
    config jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(config) = 'object'),
    credentials_ref text,
    is_default boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN modak.storage_profiles.warehouse IS 'NULL: the warehouse that the worker itself is configured with';

CREATE UNIQUE INDEX storage_profiles_one_default ON modak.storage_profiles (is_default) WHERE is_default;

CREATE FUNCTION modak.keep_one_default() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM modak.storage_profiles WHERE is_default) THEN
        RAISE EXCEPTION 'there must be a default storage profile'
            USING ERRCODE = 'MDK04', HINT = 'Make another profile the default in the same transaction.';
    END IF;
    RETURN NULL;
END
$$;

-- Deferred, so that the default can pass from one profile to another in two statements.
CREATE CONSTRAINT TRIGGER keep_one_default AFTER INSERT OR UPDATE OR DELETE ON modak.storage_profiles
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION modak.keep_one_default();

INSERT INTO modak.storage_profiles (name, is_default) VALUES ('default', true);

CREATE TABLE modak.tables (
    table_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    relid oid NOT NULL UNIQUE,
    mode text NOT NULL CHECK (mode IN ('tiered', 'mirrored')),
    pk_columns text[] NOT NULL CHECK (cardinality(pk_columns) > 0),
    pk_attnums int2[] NOT NULL,
    tier_key text NOT NULL,
    tier_attnum int2 NOT NULL,
    axis text NOT NULL CHECK (axis IN ('integer', 'date', 'timestamp', 'timestamptz')),
    partition_width bigint CHECK (partition_width > 0),
    width_months boolean NOT NULL DEFAULT false,
    width_zone text NOT NULL DEFAULT 'UTC',
    layout jsonb NOT NULL DEFAULT '{}',
    keep_heap boolean NOT NULL DEFAULT false,
    heap_retention bigint CHECK (heap_retention > 0),
    lake_retention bigint CHECK (lake_retention > 0),
    chunk_rows integer CHECK (chunk_rows > 0),
    profile_id bigint NOT NULL REFERENCES modak.storage_profiles,
    lake_namespace text NOT NULL,
    lake_name text NOT NULL,
    location text NOT NULL,
    numeric_as text NOT NULL DEFAULT 'decimal:18' CHECK (numeric_as ~ '^(decimal:[0-9]{1,2}|string)$'),
    maintenance_policy jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(maintenance_policy) = 'object'),
    frozen jsonb,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (schema_name, table_name),
    UNIQUE (lake_namespace, lake_name),
    CONSTRAINT key_columns_have_numbers CHECK (cardinality(pk_columns) = cardinality(pk_attnums)),
    CONSTRAINT keep_heap_is_tiered_only CHECK (NOT keep_heap OR mode = 'tiered'),
    CONSTRAINT lake_retention_is_tiered_only CHECK (lake_retention IS NULL OR mode = 'tiered'),
    CONSTRAINT keep_heap_excludes_lake_retention CHECK (NOT keep_heap OR lake_retention IS NULL),
    CONSTRAINT lake_retention_needs_a_width CHECK (lake_retention IS NULL OR partition_width IS NOT NULL),
    CONSTRAINT heap_retention_is_mirrored_only CHECK (heap_retention IS NULL OR mode = 'mirrored'),
    CONSTRAINT chunk_rows_is_mirrored_only CHECK (chunk_rows IS NULL OR mode = 'mirrored'),
    CONSTRAINT months_are_a_width_of_time CHECK (NOT width_months OR (partition_width IS NOT NULL AND axis <> 'integer'))
);
COMMENT ON COLUMN modak.tables.frozen IS 'The foreign snapshot that stopped publication, until an operator accepts it';

CREATE TABLE modak.cutline (
    table_id bigint PRIMARY KEY REFERENCES modak.tables ON DELETE CASCADE,
    t bigint,
    snapshot_id bigint,
    metadata_location text NOT NULL,
    frontier pg_lsn,
    retention_line bigint,
    first_floor bigint,
    lake_props jsonb NOT NULL DEFAULT '{}',
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT retention_stays_below_the_cut CHECK (retention_line IS NULL OR retention_line <= t)
);
COMMENT ON COLUMN modak.cutline.first_floor IS 'Where the cut-line began: the lake never holds rows below it';

CREATE FUNCTION modak.keep_lines_forward() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF TG_OP = 'UPDATE' THEN
        IF OLD.t IS NOT NULL AND (NEW.t IS NULL OR NEW.t < OLD.t) THEN
            RAISE EXCEPTION 'the cut-line of table % cannot go back from % to %', OLD.table_id, OLD.t, NEW.t
                USING ERRCODE = 'MDK03', HINT = 'Rows below the cut-line are only in the lake.';
        END IF;
        IF OLD.retention_line IS NOT NULL AND (NEW.retention_line IS NULL OR NEW.retention_line < OLD.retention_line) THEN
            RAISE EXCEPTION 'the retention line of table % cannot go back from % to %',
                OLD.table_id, OLD.retention_line, NEW.retention_line
                USING ERRCODE = 'MDK03', HINT = 'Rows below the retention line are gone.';
        END IF;
        NEW.updated_at := clock_timestamp();
    END IF;
    NEW.first_floor := coalesce(NEW.first_floor, NEW.t);
    RETURN NEW;
END
$$;

CREATE TRIGGER keep_lines_forward BEFORE INSERT OR UPDATE ON modak.cutline
    FOR EACH ROW EXECUTE FUNCTION modak.keep_lines_forward();

CREATE TABLE modak.partition_steps (
    from_state text NOT NULL,
    to_state text NOT NULL,
    PRIMARY KEY (from_state, to_state)
);
INSERT INTO modak.partition_steps VALUES
    ('hot', 'sealing'), ('sealing', 'tiering'), ('tiering', 'tiered'), ('tiering', 'sealing'), ('tiered', 'dropped');

CREATE TABLE modak.partitions (
    partition_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    partition_name text NOT NULL,
    lower_bound bigint,
    upper_bound bigint,
    state text NOT NULL DEFAULT 'hot' CHECK (state IN ('hot', 'sealing', 'tiering', 'tiered', 'dropped')),
    leaf_oid oid NOT NULL,
    leaf_schema text NOT NULL,
    relfilenode oid,
    trigger_oid oid,
    problem text,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT bounds_in_order CHECK (lower_bound < upper_bound)
);
-- A dropped partition stays as history; its name may be used again.
CREATE UNIQUE INDEX partitions_living_name ON modak.partitions (table_id, partition_name) WHERE state <> 'dropped';
CREATE UNIQUE INDEX partitions_living_leaf ON modak.partitions (table_id, leaf_oid) WHERE state <> 'dropped';

CREATE FUNCTION modak.keep_partition_steps() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.state NOT IN ('hot', 'tiered') THEN
            RAISE EXCEPTION 'partition % cannot begin as %', NEW.partition_name, NEW.state
                USING ERRCODE = 'MDK01', HINT = 'A partition begins as hot, or as tiered when the lake already has it.';
        END IF;
        RETURN NEW;
    END IF;
    IF NEW.state <> OLD.state AND NOT EXISTS (
        SELECT FROM modak.partition_steps s WHERE s.from_state = OLD.state AND s.to_state = NEW.state
    ) THEN
        RAISE EXCEPTION 'partition % cannot go from % to %', OLD.partition_name, OLD.state, NEW.state
            USING ERRCODE = 'MDK01', HINT = 'Legal steps are listed in modak.partition_steps.';
    END IF;
    NEW.updated_at := clock_timestamp();
    RETURN NEW;
END
$$;

CREATE TRIGGER keep_partition_steps BEFORE INSERT OR UPDATE ON modak.partitions
    FOR EACH ROW EXECUTE FUNCTION modak.keep_partition_steps();

-- One value per statement: versions of one key are ordered by who held the row.
CREATE SEQUENCE modak.delta_version CACHE 1;

-- No foreign key to modak.tables: every late write would lock the same row there.
CREATE TABLE modak.delta (
    table_id bigint NOT NULL,
    pk text NOT NULL,
    op smallint NOT NULL CHECK (op IN (1, 2)),
    tier_key bigint NOT NULL,
    old_tier_key bigint,
    version bigint NOT NULL DEFAULT nextval('modak.delta_version'),
    payload jsonb,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    folded_into bigint,
    PRIMARY KEY (table_id, pk, tier_key),
    CONSTRAINT upserts_have_an_image CHECK ((op = 1) = (payload IS NOT NULL))
);
CREATE INDEX delta_range ON modak.delta (table_id, tier_key);
COMMENT ON COLUMN modak.delta.folded_into IS 'Kept only for a pin: readers at or after this snapshot ignore the row';

CREATE FUNCTION modak.forget_delta() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM modak.delta d WHERE d.table_id = OLD.table_id;
    RETURN NULL;
END
$$;

CREATE TRIGGER forget_delta AFTER DELETE ON modak.tables FOR EACH ROW EXECUTE FUNCTION modak.forget_delta();

CREATE TABLE modak.read_pins (
    pin_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    snapshot_id bigint,
    t bigint,
    retention_line bigint,
    metadata_location text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    holder text NOT NULL
);
CREATE INDEX read_pins_of_table ON modak.read_pins (table_id, expires_at);

CREATE TABLE modak.op_steps (
    from_phase text NOT NULL,
    to_phase text NOT NULL,
    PRIMARY KEY (from_phase, to_phase)
);
INSERT INTO modak.op_steps VALUES
    ('planned', 'writing'), ('planned', 'prepared'), ('planned', 'failed'), ('planned', 'abandoned'),
    ('writing', 'prepared'), ('writing', 'failed'), ('writing', 'abandoned'),
    ('prepared', 'prepared'), ('prepared', 'committed'), ('prepared', 'failed'), ('prepared', 'abandoned'),
    ('committed', 'done'),
    ('failed', 'abandoned');

-- The journal outlives its table: folders of an unregistered table still have to be tidied.
CREATE TABLE modak.op_log (
    op_id text PRIMARY KEY,
    table_id bigint,
    kind text NOT NULL,
    phase text NOT NULL DEFAULT 'planned'
        CHECK (phase IN ('planned', 'writing', 'prepared', 'committed', 'done', 'failed', 'abandoned')),
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    counters jsonb NOT NULL DEFAULT '{}',
    error text,
    plan jsonb NOT NULL DEFAULT '{}',
    epoch bigint,
    attempt integer NOT NULL DEFAULT 0,
    folders text[] NOT NULL DEFAULT '{}',
    backend_pid integer,
    xact_id xid8,
    cleanup jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX op_log_unfinished ON modak.op_log (table_id) WHERE phase NOT IN ('done', 'abandoned');
CREATE INDEX op_log_recent ON modak.op_log (table_id, started_at DESC);

CREATE FUNCTION modak.keep_op_steps() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.phase <> 'planned' THEN
            RAISE EXCEPTION 'operation % cannot begin as %', NEW.op_id, NEW.phase
                USING ERRCODE = 'MDK02', HINT = 'An operation begins as planned.';
        END IF;
    ELSIF NEW.phase <> OLD.phase AND NOT EXISTS (
        SELECT FROM modak.op_steps s WHERE s.from_phase = OLD.phase AND s.to_phase = NEW.phase
    ) THEN
        RAISE EXCEPTION 'operation % cannot go from % to %', OLD.op_id, OLD.phase, NEW.phase
            USING ERRCODE = 'MDK02', HINT = 'Legal steps are listed in modak.op_steps.';
    END IF;
    IF NEW.phase IN ('done', 'failed', 'abandoned') THEN
        NEW.finished_at := coalesce(NEW.finished_at, clock_timestamp());
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER keep_op_steps BEFORE INSERT OR UPDATE ON modak.op_log
    FOR EACH ROW EXECUTE FUNCTION modak.keep_op_steps();

CREATE TABLE modak.load_labels (
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    label text NOT NULL,
    state text NOT NULL CHECK (state IN ('staging', 'staged', 'committed', 'failed')),
    hot_rows bigint NOT NULL DEFAULT 0,
    delta_rows bigint NOT NULL DEFAULT 0,
    spooled_rows bigint NOT NULL DEFAULT 0,
    lower_bound bigint,
    upper_bound bigint,
    files jsonb NOT NULL DEFAULT '[]',
    op_id text,
    error text,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (table_id, label)
);

CREATE TABLE modak.copy_progress (
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    chunk integer NOT NULL,
    first_pk text,
    last_pk text,
    state text NOT NULL DEFAULT 'planned' CHECK (state IN ('planned', 'copied', 'committed')),
    rows bigint NOT NULL DEFAULT 0,
    files jsonb NOT NULL DEFAULT '[]',
    op_id text,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (table_id, chunk)
);

CREATE TABLE modak.lake_stats (
    table_id bigint PRIMARY KEY REFERENCES modak.tables ON DELETE CASCADE,
    counters jsonb NOT NULL DEFAULT '{}',
    warnings jsonb NOT NULL DEFAULT '[]',
    policy jsonb NOT NULL DEFAULT '{}',
    collected_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE modak.maintenance_requests (
    request_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    requested_by text NOT NULL DEFAULT session_user,
    claimed_at timestamptz,
    op_id text
);
CREATE UNIQUE INDEX maintenance_requests_one_pending ON modak.maintenance_requests (table_id) WHERE claimed_at IS NULL;

CREATE TABLE modak.leader (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    holder text,
    epoch bigint NOT NULL DEFAULT 0,
    expires_at timestamptz NOT NULL DEFAULT '-infinity',
    backend_pid integer,
    acquired_at timestamptz
);
INSERT INTO modak.leader DEFAULT VALUES;

CREATE VIEW modak.status AS
SELECT
    tb.table_id,
    tb.schema_name,
    tb.table_name,
    tb.mode,
    c.t AS cutline_t,
    c.snapshot_id AS cutline_s,
    c.metadata_location,
    c.frontier AS mirror_frontier,
    c.retention_line,
    c.updated_at AS cutline_updated_at,
    d.backlog AS delta_backlog,
    (SELECT count(*) FROM modak.read_pins p WHERE p.table_id = tb.table_id AND p.expires_at > clock_timestamp()) AS read_pins,
    (SELECT count(*) FROM modak.load_labels l WHERE l.table_id = tb.table_id AND l.state = 'staged') AS staged_loads,
    tb.mode = 'mirrored' AND c.frontier IS NULL AS copying,
    coalesce((
        SELECT jsonb_object_agg(s.state, s.n)
        FROM (SELECT p.state, count(*) AS n FROM modak.partitions p WHERE p.table_id = tb.table_id GROUP BY p.state) s
    ), '{}') AS partition_states,
    tb.keep_heap,
    tb.axis,
    tb.frozen,
    coalesce((
        SELECT jsonb_agg(jsonb_build_object('partition', p.partition_name, 'problem', p.problem) ORDER BY p.lower_bound)
        FROM modak.partitions p WHERE p.table_id = tb.table_id AND p.problem IS NOT NULL AND p.state <> 'dropped'
    ), '[]') AS problems,
    d.oldest AS delta_oldest_at,
    (
        SELECT count(*) FROM modak.op_log o
        WHERE o.table_id = tb.table_id AND o.phase NOT IN ('done', 'abandoned', 'failed')
    ) AS unfinished_ops,
    (
        SELECT o.error FROM modak.op_log o WHERE o.table_id = tb.table_id ORDER BY o.started_at DESC LIMIT 1
    ) AS last_error
FROM modak.tables tb
LEFT JOIN modak.cutline c USING (table_id)
CROSS JOIN LATERAL (
    SELECT count(*) AS backlog, min(x.updated_at) AS oldest
    FROM modak.delta x WHERE x.table_id = tb.table_id AND x.folded_into IS NULL
) d;
GRANT SELECT ON modak.status TO pg_monitor;

-- Iceberg's JDBC catalog (layout V1), apart from everything else: Iceberg skips its own initialisation when any schema
-- has tables of these names, so they are made here.
CREATE SCHEMA modak_iceberg;

CREATE TABLE modak_iceberg.iceberg_tables (
    catalog_name varchar(255) NOT NULL,
    table_namespace varchar(255) NOT NULL,
    table_name varchar(255) NOT NULL,
    metadata_location varchar(1000),
    previous_metadata_location varchar(1000),
    iceberg_type varchar(5),
    PRIMARY KEY (catalog_name, table_namespace, table_name)
);

CREATE TABLE modak_iceberg.iceberg_namespace_properties (
    catalog_name varchar(255) NOT NULL,
    namespace varchar(255) NOT NULL,
    property_key varchar(255),
    property_value varchar(1000),
    PRIMARY KEY (catalog_name, namespace, property_key)
);
