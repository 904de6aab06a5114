-- Another engine gets the delta's images under the names that the columns have now, decided by age as in our own reads, and
-- is told which column of the pinned lake file is which. Every commit notes the names that the lake has.

CREATE TABLE modak.lake_columns (
    table_id bigint PRIMARY KEY REFERENCES modak.tables ON DELETE CASCADE,
    numbers jsonb NOT NULL CHECK (jsonb_typeof(numbers) = 'object'),
    names text[] NOT NULL
);
COMMENT ON COLUMN modak.lake_columns.numbers IS 'Attribute number in Postgres → column of the lake, as images of the delta have followed it';
COMMENT ON COLUMN modak.lake_columns.names IS 'All columns of the lake table, also those whose heap column was dropped';

ALTER TABLE modak.read_pins ADD COLUMN lake_columns jsonb;
COMMENT ON COLUMN modak.read_pins.lake_columns IS 'The row of modak.lake_columns that belongs to the pinned metadata file';

CREATE FUNCTION modak.columns_now(of_table bigint, lake jsonb)
    RETURNS TABLE (number int2, name text, since text, was text, there boolean, missing text)
    LANGUAGE sql STABLE
AS $$
    -- was: its column in the lake; there: whether the lake has a column of its name, perhaps of somebody dropped. A
    -- partitioned table holds no rows, so the value that old rows show is recorded at its leaves.
    SELECT a.attnum, a.attname::text, a.xmin::text, lake -> 'numbers' ->> a.attnum::text,
        coalesce(lake -> 'names' ? a.attname, false), m.value
    FROM modak.tables t JOIN pg_attribute a ON a.attrelid = t.relid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN (
        SELECT b.attname, min(shown.value) AS value
        FROM modak.tables o
        JOIN pg_attribute b ON b.attrelid = o.relid OR b.attrelid IN (
            SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = o.relid)
        CROSS JOIN LATERAL (SELECT (b.attmissingval::text::text[])[1] AS value) shown
        WHERE o.table_id = of_table AND b.atthasmissing AND NOT b.attisdropped AND b.attnum > 0
        GROUP BY b.attname HAVING count(DISTINCT shown.value) = 1
    ) m ON m.attname = a.attname
    WHERE t.table_id = of_table
$$;
REVOKE EXECUTE ON FUNCTION modak.columns_now(bigint, jsonb) FROM PUBLIC;

CREATE FUNCTION modak.image_now_sql(of_table bigint) RETURNS text
    LANGUAGE sql STABLE
AS $$
    -- An expression over a row d of modak.delta. Names may have been swapped or given to new columns since an image was
    -- written: the age of a column's description tells whether the image is older than the name.
    WITH here AS MATERIALIZED (
        -- A lake that knows the columns of another table by number tells nothing about this one's.
        SELECT c.* FROM modak.columns_now(of_table, (
            SELECT to_jsonb(l) FROM modak.lake_columns l WHERE l.table_id = of_table AND l.numbers <> '{}')) c
    ), renamed AS (
        SELECT h.was AS old, h.name AS now,
            format('(age(d.xid::xid) > age(%L::xid) OR NOT d.payload ? %L)', h.since, h.name) AS older
        FROM here h WHERE h.was <> h.name
        UNION ALL
        -- The name belonged to a column that is dropped: what older images have under it is nobody's.
        SELECT h.name, NULL, format('age(d.xid::xid) > age(%L::xid)', h.since)
        FROM here h WHERE h.was IS NULL AND h.there
            AND NOT EXISTS (SELECT FROM here o WHERE o.was = h.name)
    ), chosen AS (
        SELECT h.number, h.name, format('CASE %sWHEN d.payload ? %L%s THEN d.payload ->> %L ELSE %L END',
            (
                SELECT string_agg(format('WHEN d.payload ? %L AND %s THEN d.payload ->> %L ', r.old, r.older, r.old), '')
                FROM renamed r WHERE r.now = h.name
            ), h.name,
            (SELECT string_agg(format(' AND NOT %s', r.older), '') FROM renamed r WHERE r.old = h.name),
            h.name, h.missing) AS value
        FROM here h
    )
    SELECT format('CASE WHEN d.op = 1 THEN CASE WHEN age(d.xid::xid) < (%L::integer) AND d.payload ?& %L::text[]'
            ' THEN d.payload ELSE jsonb_object(ARRAY[%s]::text[], ARRAY[%s]::text[]) END END',
        (
            SELECT min(age(a.xmin)) FROM pg_attribute a JOIN modak.tables t ON a.attrelid = t.relid
            WHERE t.table_id = of_table AND a.attnum > 0
        ),
        array_agg(c.name ORDER BY c.number), string_agg(quote_literal(c.name), ', ' ORDER BY c.number),
        string_agg(c.value, ', ' ORDER BY c.number))
    FROM chosen c
$$;
REVOKE EXECUTE ON FUNCTION modak.image_now_sql(bigint) FROM PUBLIC;

CREATE FUNCTION modak.held_pin(pin bigint) RETURNS modak.read_pins
    LANGUAGE plpgsql STABLE
AS $$
DECLARE
    held modak.read_pins;
BEGIN
    SELECT * INTO held FROM modak.read_pins p
    WHERE p.pin_id = pin AND p.expires_at > clock_timestamp() AND pg_has_role(modak.caller(), p.holder::name, 'USAGE');
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no pin % of yours', pin
            USING ERRCODE = 'undefined_object', HINT = 'It has lapsed or ended; begin the read again.';
    END IF;
    RETURN held;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.held_pin(bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION modak.modak_read_delta(
    pin bigint, OUT pk text, OUT op smallint, OUT tier_key bigint, OUT version bigint, OUT payload jsonb
) RETURNS SETOF record
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET "TimeZone" = 'UTC'
    SET "DateStyle" = 'ISO, YMD'
    SET "IntervalStyle" = 'iso_8601'
    SET extra_float_digits = 1
    SET bytea_output = 'hex'
    SET lc_monetary = 'C'
AS $$
DECLARE
    held CONSTANT modak.read_pins := modak.held_pin(pin);
BEGIN
    -- What lies over the lake as it was pinned: rows not yet folded, and rows that were folded after it.
    RETURN QUERY EXECUTE format('SELECT d.pk, d.op, d.tier_key, d.version, %s FROM modak.delta d'
        ' WHERE d.table_id = $1 AND d.tier_key < $2 AND ($3 IS NULL OR d.tier_key >= $3)'
        ' AND (d.folded_generation IS NULL OR d.folded_generation > $4)', modak.image_now_sql(held.table_id))
        USING held.table_id, held.t, held.retention_line, held.generation;
END
$$;

CREATE FUNCTION modak.modak_read_columns(
    pin bigint, OUT column_name text, OUT lake_name text, OUT missing text
) RETURNS SETOF record
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET "TimeZone" = 'UTC'
    SET "DateStyle" = 'ISO, YMD'
    SET "IntervalStyle" = 'iso_8601'
    SET extra_float_digits = 1
    SET bytea_output = 'hex'
    SET lc_monetary = 'C'
AS $$
DECLARE
    held CONSTANT modak.read_pins := modak.held_pin(pin);
    known CONSTANT boolean := coalesce(held.lake_columns -> 'numbers', '{}') <> '{}';
BEGIN
    RETURN QUERY SELECT c.name,
        CASE WHEN known THEN c.was WHEN held.lake_columns IS NULL OR c.there THEN c.name END, c.missing
    FROM modak.columns_now(held.table_id, held.lake_columns) c ORDER BY c.number;
END
$$;

CREATE OR REPLACE FUNCTION modak.modak_read_begin(
    target regclass, lifetime interval DEFAULT '15 minutes',
    OUT pin_id bigint, OUT t bigint, OUT snapshot_id bigint, OUT metadata_location text, OUT retention_line bigint,
    OUT expires_at timestamptz, OUT generation bigint, OUT delta_query text
)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
BEGIN
    PERFORM modak.require_reader(target);
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- An older snapshot could pin a lake state that is already being deleted.
        RAISE EXCEPTION 'a read pin must be taken before a % transaction begins', current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction', HINT = 'Call modak_read_begin in a transaction of its own, then begin.';
    END IF;
    IF lifetime <= interval '0' OR lifetime > interval '7 days' THEN
        RAISE EXCEPTION 'a pin lives up to seven days, not %', lifetime USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pg_advisory_xact_lock_shared(modak.pin_lock_key(entry.table_id));
    INSERT INTO modak.read_pins AS p
        (table_id, snapshot_id, t, retention_line, metadata_location, expires_at, holder, generation, lake_columns)
    SELECT c.table_id, c.snapshot_id, c.t, c.retention_line, c.metadata_location, clock_timestamp() + lifetime,
        modak.caller(), c.generation, to_jsonb(l)
    FROM modak.cutline c LEFT JOIN modak.lake_columns l USING (table_id) WHERE c.table_id = entry.table_id
    RETURNING p.pin_id, p.t, p.snapshot_id, p.metadata_location, p.retention_line, p.expires_at, p.generation
    INTO pin_id, t, snapshot_id, metadata_location, retention_line, expires_at, generation;
    IF pin_id IS NULL THEN
        RAISE EXCEPTION '% has no lake table yet', target
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Its registration has not finished.';
    END IF;
    delta_query := format('SELECT pk, op, tier_key, version, payload FROM modak.modak_read_delta(%s)', pin_id);
END
$$;

CREATE FUNCTION public.modak_read_columns(
    pin bigint, OUT column_name text, OUT lake_name text, OUT missing text
) RETURNS SETOF record
    LANGUAGE sql STABLE AS $$ SELECT * FROM modak.modak_read_columns(pin) $$;
