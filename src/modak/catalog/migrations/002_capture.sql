-- Late writes: from the moment a leaf is sealed, every change to it is also a row of modak.delta, in the writer's own
-- transaction. Bodies here write a backslash as chr(92), because the writer's session decides how literals are read.

-- The helpers have no search_path of their own: their callers have, and a function without settings is inlined.

CREATE FUNCTION modak.base_type(of oid) RETURNS oid
    LANGUAGE plpgsql STABLE
AS $$
DECLARE
    base oid;
BEGIN
    LOOP
        SELECT t.typbasetype INTO base FROM pg_catalog.pg_type t WHERE t.oid = of AND t.typtype = 'd';
        IF NOT FOUND THEN
            RETURN of;
        END IF;
        of := base;
    END LOOP;
END
$$;

CREATE FUNCTION modak.axis_sql(axis text, attribute text) RETURNS text
    LANGUAGE sql IMMUTABLE
AS $$
    -- Infinities, and timestamps whose microseconds do not fit, are the ends of the axis: a write never fails for them.
    SELECT CASE axis
        WHEN 'integer' THEN format('(r.%I)::bigint', attribute)
        WHEN 'date' THEN format(
            'CASE WHEN isfinite((r.%1$I)::date) THEN ((r.%1$I)::date - date ''1970-01-01'')::bigint'
            ' WHEN (r.%1$I)::date > date ''1970-01-01'' THEN 9223372036854775807 ELSE -9223372036854775808 END', attribute)
        ELSE format(
            'CASE WHEN isfinite((r.%1$I)::%2$s)'
            ' THEN least(extract(epoch FROM (r.%1$I)::%2$s) * 1000000, 9223372036854775807)::bigint'
            ' WHEN (r.%1$I)::%2$s > ''epoch''::%2$s THEN 9223372036854775807 ELSE -9223372036854775808 END',
            attribute, axis)
    END
$$;

CREATE FUNCTION modak.axis_literal(axis text, key bigint) RETURNS text
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp SET "TimeZone" = 'UTC' SET "DateStyle" = 'ISO, YMD'
AS $$
    -- Days and the rest of the day apart: interval arithmetic goes through floats, exact only for small numbers.
    SELECT CASE axis
        WHEN 'integer' THEN key::text
        WHEN 'date' THEN (date '1970-01-01' + key::integer)::text
        ELSE (timestamp 'epoch' + (key / 86400000000) * interval '1 day'
            + (key % 86400000000) * interval '1 microsecond')::text
            || CASE WHEN axis = 'timestamptz' THEN '+00' ELSE '' END
    END
$$;

CREATE FUNCTION modak.image_sql(leaf oid, keys int2[], tier int2, axis text)
    RETURNS TABLE (pk text, tier_key text, payload text, same_identity text)
    LANGUAGE sql STABLE
AS $$
    -- Expressions over a row called r; same_identity compares it with the row given as $1. A cast of somebody's own type
    -- is somebody's own function, and the expressions run with the worker's rights: such types go through their output
    -- function, which cannot be replaced.
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
        WHERE a.attrelid = leaf AND a.attnum > 0 AND NOT a.attisdropped
    ) c
$$;

CREATE FUNCTION modak.record_change(
    of_table bigint, of_pk text, at_key bigint, from_key bigint, image jsonb
) RETURNS void
    LANGUAGE plpgsql
AS $$
BEGIN
    -- No image is a tombstone. The version is drawn while the row is held, so versions of one key never run backwards.
    INSERT INTO modak.delta AS d (table_id, pk, tier_key, op, old_tier_key, version, payload)
    VALUES (of_table, of_pk, at_key, CASE WHEN image IS NULL THEN 2 ELSE 1 END, from_key, nextval('modak.delta_version'), image)
    ON CONFLICT (table_id, pk, tier_key) DO UPDATE SET
        op = excluded.op, payload = excluded.payload, version = nextval('modak.delta_version'),
        old_tier_key = coalesce(excluded.old_tier_key, d.old_tier_key),
        xid = pg_current_xact_id(), updated_at = clock_timestamp(), folded_into = NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.record_change(bigint, text, bigint, bigint, jsonb) FROM PUBLIC;

CREATE FUNCTION modak.capture() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET "TimeZone" = 'UTC'
    SET "DateStyle" = 'ISO, YMD'
    SET "IntervalStyle" = 'iso_8601'
    SET extra_float_digits = 1
    SET bytea_output = 'hex'
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
-- Whoever may attach this trigger to a table of theirs may write the delta of any table.
REVOKE EXECUTE ON FUNCTION modak.capture() FROM PUBLIC;

CREATE FUNCTION modak.refuse_truncate() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION 'cannot truncate %.%: the partition is on its way to the lake', TG_TABLE_SCHEMA, TG_TABLE_NAME
        USING ERRCODE = 'object_not_in_prerequisite_state',
        HINT = 'Use DELETE: deleted rows are followed into the lake, truncated ones cannot be.';
END
$$;

CREATE FUNCTION modak.install_capture(watched bigint, leaf oid) RETURNS oid
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry modak.tables;
    keys int2[];
    tier int2;
    arguments text;
    reader name;
    existing oid;
BEGIN
    SELECT * INTO STRICT entry FROM modak.tables t WHERE t.table_id = watched;
    -- The root's column numbers survive renames; the recorded names serve when the root is gone.
    SELECT array_agg(own.attnum ORDER BY k.n) FILTER (WHERE k.n <= cardinality(entry.pk_attnums)),
        min(own.attnum) FILTER (WHERE k.n > cardinality(entry.pk_attnums))
    INTO keys, tier
    FROM unnest(entry.pk_attnums || entry.tier_attnum, entry.pk_columns || entry.tier_key) WITH ORDINALITY k (number, name, n)
    LEFT JOIN pg_attribute root ON root.attrelid = entry.relid AND root.attnum = k.number AND NOT root.attisdropped
    JOIN pg_attribute own ON own.attrelid = leaf AND NOT own.attisdropped AND own.attname = coalesce(root.attname, k.name);
    IF tier IS NULL OR cardinality(keys) IS DISTINCT FROM cardinality(entry.pk_attnums) THEN
        RAISE EXCEPTION 'cannot find the key columns of %.% in %', entry.schema_name, entry.table_name, leaf::regclass
            USING ERRCODE = 'undefined_column';
    END IF;
    arguments := format('%L, %L, %L', watched, keys, tier);
    -- The trigger reads the leaf with a right of its own: a worker that loses its membership in the owner's role must
    -- not take the users' writes with it.
    SELECT pg_get_userbyid(p.proowner) INTO reader FROM pg_proc p WHERE p.oid = 'modak.capture'::regproc
        AND NOT EXISTS (SELECT FROM pg_class c JOIN pg_roles r ON r.oid = p.proowner
            WHERE c.oid = leaf AND (r.rolsuper OR c.relowner = r.oid));
    IF reader IS NOT NULL THEN
        EXECUTE format('GRANT SELECT ON %s TO %I', leaf::regclass, reader);
    END IF;

    SELECT g.oid INTO existing FROM pg_trigger g
    WHERE g.tgrelid = leaf AND g.tgname = '!modak_capture' AND g.tgfoid = 'modak.capture'::regproc AND g.tgtype = 29
        AND g.tgenabled = 'A' AND g.tgqual IS NULL
        AND g.tgargs = decode(concat_ws('00', encode(convert_to(watched::text, 'UTF8'), 'hex'),
            encode(convert_to(keys::text, 'UTF8'), 'hex'), encode(convert_to(tier::text, 'UTF8'), 'hex'), ''), 'hex');
    IF existing IS NULL THEN
        EXECUTE format('DROP TRIGGER IF EXISTS "!modak_capture" ON %s', leaf::regclass);
        EXECUTE format('CREATE TRIGGER "!modak_capture" AFTER INSERT OR UPDATE OR DELETE ON %s'
            ' FOR EACH ROW EXECUTE FUNCTION modak.capture(%s)', leaf::regclass, arguments);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER "!modak_capture"', leaf::regclass);
        SELECT g.oid INTO STRICT existing FROM pg_trigger g WHERE g.tgrelid = leaf AND g.tgname = '!modak_capture';
    END IF;
    IF NOT EXISTS (
        SELECT FROM pg_trigger g WHERE g.tgrelid = leaf AND g.tgname = '!modak_no_truncate' AND g.tgenabled = 'A'
            AND g.tgfoid = 'modak.refuse_truncate'::regproc
    ) THEN
        EXECUTE format('DROP TRIGGER IF EXISTS "!modak_no_truncate" ON %s', leaf::regclass);
        EXECUTE format('CREATE TRIGGER "!modak_no_truncate" BEFORE TRUNCATE ON %s'
            ' FOR EACH STATEMENT EXECUTE FUNCTION modak.refuse_truncate()', leaf::regclass);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER "!modak_no_truncate"', leaf::regclass);
    END IF;
    RETURN existing;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.install_capture(bigint, oid) FROM PUBLIC;

CREATE FUNCTION modak.remove_capture(leaf oid) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_class c WHERE c.oid = leaf) THEN
        EXECUTE format('DROP TRIGGER IF EXISTS "!modak_capture" ON %s', leaf::regclass);
        EXECUTE format('DROP TRIGGER IF EXISTS "!modak_no_truncate" ON %s', leaf::regclass);
    END IF;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.remove_capture(oid) FROM PUBLIC;
