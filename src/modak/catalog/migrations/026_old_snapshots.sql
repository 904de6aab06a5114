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
