-- A transaction that keeps its snapshot (REPEATABLE READ, SERIALIZABLE) reads our tables and Postgres' catalog as they were when
-- it began, while its statements write into the tables, and fire the triggers, of now. What the snapshot does not know
-- would be lost in silence: such a transaction is told to try again.

CREATE FUNCTION modak.as_described(rel oid) RETURNS oid
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Numbers of columns have no gaps, and pg_describe_object looks past the snapshot: it knows a column that has come.
    IF (
        SELECT coalesce(bool_or(modak.has_ended_since(a.xmax)), false)
            OR pg_describe_object('pg_class'::regclass, rel, count(*)::integer + 1) IS NOT NULL
        FROM pg_attribute a WHERE a.attrelid = rel AND a.attnum > 0
    ) THEN
        RAISE EXCEPTION 'the columns of % have changed in the meantime', rel::regclass
            USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
    END IF;
    RETURN rel;
END
$$;
COMMENT ON FUNCTION modak.as_described(oid) IS 'The relation, if the snapshot shows its columns as they are';

CREATE FUNCTION modak.refuse_younger(rel oid, called name) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- A trigger whose table the snapshot does not know was left behind when the table was unregistered, unless it is
    -- younger than the snapshot itself.
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') AND NOT EXISTS (
        SELECT FROM pg_trigger g WHERE g.tgrelid = rel AND g.tgname = called AND NOT modak.has_ended_since(g.xmax)
    ) THEN
        RAISE EXCEPTION 'partition % has changed in the meantime', rel::regclass
            USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION modak.image_sql(leaf oid, keys int2[], tier int2, axis text)
    RETURNS TABLE (pk text, tier_key text, payload text, same_identity text)
    LANGUAGE sql STABLE
AS $$
    -- Expressions over a row called r; same_identity compares it with the row given as $1. A cast of somebody's own type
    -- is somebody's own function, and the expressions run with the worker's rights: such types go through their output
    -- function, which cannot be replaced. Only what keeps one snapshot can have an outdated one.
    SELECT
        CASE WHEN cardinality(keys) = 1 THEN min(c.as_text) FILTER (WHERE c.attnum = keys[1])
        ELSE string_agg(
            format('replace(replace(%s, chr(92), chr(92) || chr(92)), chr(31), chr(92) || chr(31))', c.as_text),
            ' || chr(31) || ' ORDER BY array_position(keys, c.attnum)) FILTER (WHERE c.attnum = ANY (keys))
        END,
        modak.axis_sql(axis, min(c.attname) FILTER (WHERE c.attnum = tier)),
        format('jsonb_object(ARRAY[%s]::text[], ARRAY[%s]::text[])',
            string_agg(quote_literal(c.attname), ', ' ORDER BY c.attnum), string_agg(c.as_text, ', ' ORDER BY c.attnum)),
        string_agg(format('r.%1$I = ($1).%1$I', c.attname), ' AND ') FILTER (WHERE c.attnum = ANY (keys || tier))
    FROM (
        SELECT a.attnum, a.attname::text AS attname, CASE
            WHEN (CASE WHEN t.typtype = 'd' THEN (
                SELECT b.typnamespace FROM pg_catalog.pg_type b WHERE b.oid = modak.base_type(t.oid)
            ) ELSE t.typnamespace END) = 'pg_catalog'::regnamespace THEN format('(r.%I)::text', a.attname)
            ELSE format('CASE WHEN r.%1$I IS DISTINCT FROM NULL THEN format(''%%s'', r.%1$I) END', a.attname)
        END AS as_text
        FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
        WHERE a.attrelid = CASE
                WHEN current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
                THEN modak.as_described(leaf) ELSE leaf END
            AND a.attnum > 0 AND NOT a.attisdropped
    ) c
$$;

CREATE OR REPLACE FUNCTION modak.capture() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET "TimeZone" = 'UTC'
    SET "DateStyle" = 'ISO, YMD'
    SET "IntervalStyle" = 'iso_8601'
    SET extra_float_digits = 1
    SET bytea_output = 'hex'
    SET lc_monetary = 'C'
    SET row_security = off
    SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    -- Numbers of the leaf's own columns, so that neither a rename nor a detach changes what they mean.
    watched CONSTANT bigint := TG_ARGV[0];
    image record;
    identity text;
    look_up text;
    place record;
    origin record;
BEGIN
    SELECT i.* INTO image
    FROM modak.tables t, modak.image_sql(TG_RELID, TG_ARGV[1]::int2[], TG_ARGV[2]::int2, t.axis) i
    WHERE t.table_id = watched;
    IF NOT FOUND THEN
        PERFORM modak.refuse_younger(TG_RELID, TG_NAME);
        RETURN NULL;
    END IF;
    identity := format('SELECT %s AS pk, %s AS tier_key FROM (SELECT ($1).*) r', image.pk, image.tier_key);
    -- The image is what the leaf holds now, not NEW: a user's trigger may already have changed a row whose own event
    -- is still to come.
    look_up := format('SELECT i.pk, i.tier_key, (SELECT %s FROM ONLY %s r WHERE %s) AS payload FROM (%s) i',
        image.payload, TG_RELID::regclass, image.same_identity, identity);
    IF TG_OP = 'DELETE' THEN
        EXECUTE look_up INTO place USING OLD;
        PERFORM modak.record_change(watched, place.pk, place.tier_key, NULL, place.payload);
        RETURN NULL;
    END IF;
    EXECUTE look_up INTO place USING NEW;
    IF TG_OP = 'UPDATE' THEN
        EXECUTE identity INTO origin USING OLD;
        IF (origin.pk, origin.tier_key) <> (place.pk, place.tier_key) THEN
            EXECUTE look_up INTO origin USING OLD;
            PERFORM modak.record_change(watched, origin.pk, origin.tier_key, NULL, origin.payload);
            PERFORM modak.record_change(watched, place.pk, place.tier_key, origin.tier_key, place.payload);
            RETURN NULL;
        END IF;
    END IF;
    PERFORM modak.record_change(watched, place.pk, place.tier_key, NULL, place.payload);
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION modak.divert() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET "TimeZone" = 'UTC'
    SET "DateStyle" = 'ISO, YMD'
    SET "IntervalStyle" = 'iso_8601'
    SET extra_float_digits = 1
    SET bytea_output = 'hex'
    SET lc_monetary = 'C'
    SET row_security = off
    SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    -- The bounds are arguments, so that they change together with the bounds of the partition.
    watched CONSTANT bigint := TG_ARGV[0];
    keys CONSTANT int2[] := TG_ARGV[1];
    tier CONSTANT int2 := TG_ARGV[2];
    floor CONSTANT bigint := TG_ARGV[3];
    ceiling CONSTANT bigint := TG_ARGV[4];
    entry record;
    image record;
    columns text;
    place record;
BEGIN
    SELECT t.schema_name, t.table_name, t.relid, t.axis, c.retention_line, s.shape = modak.shape(TG_RELID) AS in_shape
    INTO entry
    FROM modak.tables t JOIN modak.cutline c USING (table_id) JOIN modak.spills s USING (table_id)
    WHERE t.table_id = watched;
    IF NOT FOUND THEN
        PERFORM modak.refuse_younger(TG_RELID, TG_NAME);
        RAISE EXCEPTION 'the table of spill partition % is no longer registered', TG_RELID::regclass
            USING ERRCODE = 'check_violation', HINT = format('Drop it: DROP TABLE %s', TG_RELID::regclass);
    END IF;
    IF TG_NARGS = 5 THEN
        PERFORM modak.refuse_policed(entry.relid);
    ELSIF TG_ARGV[5] = 'policed' THEN
        PERFORM modak.refuse_history(entry.relid);
    END IF;
    IF NOT entry.in_shape THEN
        -- The first writer after a change of the table makes the shadow anew; others wait for its commit.
        PERFORM FROM modak.spills s WHERE s.table_id = watched FOR UPDATE;
        PERFORM modak.make_shadow(watched, TG_RELID);
        UPDATE modak.spills s SET shape = modak.shape(TG_RELID) WHERE s.table_id = watched;
    END IF;

    SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) INTO columns
    FROM pg_attribute a WHERE a.attrelid = TG_RELID AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '';
    SELECT * INTO image FROM modak.image_sql(TG_RELID, keys, tier, entry.axis);
    -- Only a real table can judge a row: NOT NULL, CHECK, generated columns and types hold because the row was in one.
    EXECUTE format('INSERT INTO %s AS r (%s) SELECT %s FROM (SELECT ($1).*) n RETURNING r.ctid AS at, %s AS pk, %s AS tier_key,'
        ' %s AS payload', modak.shadow_name(watched), columns, columns, image.pk, image.tier_key, image.payload)
        INTO place USING NEW;
    EXECUTE format('DELETE FROM %s WHERE ctid = $1', modak.shadow_name(watched)) USING place.at;

    IF place.tier_key < floor THEN
        RAISE EXCEPTION 'no partition of %.% for tier key %', entry.schema_name, entry.table_name,
            modak.axis_literal(entry.axis, place.tier_key)
            USING ERRCODE = 'check_violation', SCHEMA = entry.schema_name, TABLE = entry.table_name,
            DETAIL = format('Its history begins at %s.', modak.axis_literal(entry.axis, floor)),
            HINT = 'Rows older than the first registered partition cannot be written.';
    ELSIF place.tier_key >= ceiling THEN
        RAISE EXCEPTION 'tier key % does not belong into the spill partition of %.%',
            modak.axis_literal(entry.axis, place.tier_key), entry.schema_name, entry.table_name
            USING ERRCODE = 'check_violation', SCHEMA = entry.schema_name, TABLE = entry.table_name,
            HINT = format('Insert into %I.%I itself.', entry.schema_name, entry.table_name);
    ELSIF place.tier_key < entry.retention_line THEN
        RAISE EXCEPTION 'tier key % lies below the retention line % of %.%', modak.axis_literal(entry.axis, place.tier_key),
            modak.axis_literal(entry.axis, entry.retention_line), entry.schema_name, entry.table_name
            USING ERRCODE = 'check_violation', SCHEMA = entry.schema_name, TABLE = entry.table_name,
            HINT = 'Rows below the retention line have expired; there is nothing left to add to.';
    END IF;
    PERFORM modak.record_change(watched, place.pk, place.tier_key, NULL, place.payload);
    IF current_setting('modak.explain', true) IN ('on', 'true', '1') THEN
        RAISE NOTICE 'modak: row % of %.% goes to the delta', place.pk, entry.schema_name, entry.table_name;
    END IF;
    RETURN NULL;
END
$$;
