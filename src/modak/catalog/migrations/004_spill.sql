-- Transparent writes: a range partition below the lowest leaf that takes historical rows and keeps none. Its trigger
-- turns rows of the reclaimed range into the delta and refuses the rest.

CREATE TABLE modak.spills (
    table_id bigint PRIMARY KEY REFERENCES modak.tables ON DELETE CASCADE,
    spill_oid oid NOT NULL,
    lower_bound bigint NOT NULL,
    upper_bound bigint NOT NULL,
    shape text NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT bounds_in_order CHECK (lower_bound <= upper_bound)
);
COMMENT ON COLUMN modak.spills.shape IS 'Which definition of columns and checks the shadow table was made from';

CREATE FUNCTION modak.shape(rel oid) RETURNS text
    LANGUAGE sql STABLE
AS $$
    -- Changes with every new version of a catalog row that describes a column or a check, and is cheap to ask per row.
    SELECT concat_ws('|',
        (
            SELECT string_agg(concat(a.xmin, a.ctid), ',' ORDER BY a.attnum)
            FROM pg_catalog.pg_attribute a WHERE a.attrelid = rel AND a.attnum > 0
        ),
        (
            SELECT string_agg(concat(c.xmin, c.ctid), ',' ORDER BY c.oid)
            FROM pg_catalog.pg_constraint c WHERE c.conrelid = rel AND c.contype = 'c'
        ))
$$;

CREATE FUNCTION modak.shadow_name(of_table bigint) RETURNS text
    LANGUAGE sql IMMUTABLE
AS $$ SELECT 'modak.shadow_' || of_table $$;

CREATE FUNCTION modak.make_shadow(of_table bigint, spill oid) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
BEGIN
    EXECUTE format('DROP TABLE IF EXISTS %s', modak.shadow_name(of_table));
    EXECUTE format('CREATE UNLOGGED TABLE %s (LIKE %s INCLUDING CONSTRAINTS INCLUDING GENERATED)',
        modak.shadow_name(of_table), spill::regclass);
END
$$;
REVOKE EXECUTE ON FUNCTION modak.make_shadow(bigint, oid) FROM PUBLIC;

CREATE FUNCTION modak.divert() RETURNS trigger
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
    SELECT t.schema_name, t.table_name, t.axis, c.retention_line, s.shape = modak.shape(TG_RELID) AS in_shape
    INTO entry
    FROM modak.tables t JOIN modak.cutline c USING (table_id) JOIN modak.spills s USING (table_id)
    WHERE t.table_id = watched;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the table of spill partition % is no longer registered', TG_RELID::regclass
            USING ERRCODE = 'check_violation', HINT = format('Drop it: DROP TABLE %s', TG_RELID::regclass);
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
REVOKE EXECUTE ON FUNCTION modak.divert() FROM PUBLIC;

CREATE FUNCTION modak.spill_name(table_name text) RETURNS text
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    WHILE octet_length(table_name) > 63 - octet_length('_modak_spill') LOOP
        table_name := left(table_name, -1);
    END LOOP;
    RETURN table_name || '_modak_spill';
END
$$;

CREATE FUNCTION modak.attach_spill(watched bigint, floor bigint, ceiling bigint) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry modak.tables;
    spill text;
    made oid;
    keys int2[];
    tier int2;
BEGIN
    SELECT * INTO STRICT entry FROM modak.tables t WHERE t.table_id = watched;
    spill := format('%I.%I', entry.schema_name, modak.spill_name(entry.table_name));
    -- Made apart and attached: CREATE … PARTITION OF would lock out every reader of the table.
    EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING STORAGE)',
        spill, entry.relid::regclass);
    made := spill::regclass;
    SELECT array_agg(own.attnum ORDER BY array_position(entry.pk_attnums, root.attnum))
            FILTER (WHERE root.attnum = ANY (entry.pk_attnums)),
        min(own.attnum) FILTER (WHERE root.attnum = entry.tier_attnum)
    INTO keys, tier
    FROM pg_attribute root JOIN pg_attribute own USING (attname)
    WHERE root.attrelid = entry.relid AND own.attrelid = made;
    -- Sorts last: the user's BEFORE triggers have had their say.
    EXECUTE format('CREATE TRIGGER "~modak_spill" BEFORE INSERT ON %s FOR EACH ROW'
        ' EXECUTE FUNCTION modak.divert(%L, %L, %L, %L, %L)',
        spill, watched, keys, tier, floor, ceiling);
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER "~modak_spill"', spill);
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (MINVALUE) TO (%L)',
        entry.relid::regclass, spill, modak.axis_literal(entry.axis, ceiling));
    PERFORM modak.make_shadow(watched, made);
    INSERT INTO modak.spills AS s VALUES (watched, made, floor, ceiling, modak.shape(made))
    ON CONFLICT (table_id) DO UPDATE SET spill_oid = excluded.spill_oid, upper_bound = excluded.upper_bound,
        shape = excluded.shape, updated_at = clock_timestamp();
    RETURN spill;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.attach_spill(bigint, bigint, bigint) FROM PUBLIC;

CREATE FUNCTION modak.drop_spill(watched bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    spill oid;
    parent oid;
    stray boolean;
BEGIN
    SELECT s.spill_oid, i.inhparent INTO spill, parent
    FROM modak.spills s JOIN pg_class c ON c.oid = s.spill_oid LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
    WHERE s.table_id = watched;
    IF spill IS NULL THEN
        RETURN;
    END IF;
    IF parent IS NOT NULL THEN
        EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', parent::regclass);
    END IF;
    EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', spill::regclass);
    EXECUTE format('SELECT EXISTS (SELECT FROM ONLY %s)', spill::regclass) INTO stray;
    IF stray THEN
        RAISE EXCEPTION 'spill partition % holds rows, which its trigger should never let happen', spill::regclass
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Look at the rows and move them by hand.';
    END IF;
    EXECUTE format('DROP TABLE %s', spill::regclass);
END
$$;
REVOKE EXECUTE ON FUNCTION modak.drop_spill(bigint) FROM PUBLIC;

CREATE FUNCTION modak.widen_spill(watched bigint, ceiling bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    spill modak.spills;
    cut bigint;
BEGIN
    SELECT * INTO spill FROM modak.spills s WHERE s.table_id = watched FOR UPDATE;
    IF NOT FOUND OR spill.upper_bound >= ceiling THEN
        RETURN;
    END IF;
    SELECT c.t INTO cut FROM modak.cutline c WHERE c.table_id = watched;
    IF cut IS NULL OR ceiling > cut THEN
        RAISE EXCEPTION 'cannot spill up to %: the cut-line of table % is at %', ceiling, watched, cut
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    PERFORM modak.drop_spill(watched);
    PERFORM modak.attach_spill(watched, spill.lower_bound, ceiling);
END
$$;
REVOKE EXECUTE ON FUNCTION modak.widen_spill(bigint, bigint) FROM PUBLIC;

CREATE FUNCTION modak.lowest_leaf(root oid, axis text, OUT lowest bigint, OUT in_the_way text)
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET "TimeZone" = 'UTC' SET "DateStyle" = 'ISO, YMD'
AS $$
DECLARE
    leaf record;
    at bigint;
BEGIN
    FOR leaf IN
        SELECT c.oid, pg_get_expr(c.relpartbound, c.oid) AS bound,
            substring(pg_get_expr(c.relpartbound, c.oid) FROM '^FOR VALUES FROM [(](.*)[)] TO [(].*[)]$') AS starts
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = root
    LOOP
        IF leaf.starts IS NULL OR leaf.starts = 'MINVALUE' THEN
            in_the_way := leaf.oid::regclass || ' ' || leaf.bound;
        ELSE
            EXECUTE format('SELECT %s FROM (SELECT (%s)::%s AS v) r', modak.axis_sql(axis, 'v'), leaf.starts,
                CASE axis WHEN 'integer' THEN 'bigint' ELSE axis END) INTO at;
            lowest := least(lowest, at);
        END IF;
    END LOOP;
END
$$;

CREATE FUNCTION modak.modak_enable_transparent_writes(target regclass) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms'
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
    line modak.cutline;
    leaves record;
    ceiling bigint;
    present regclass;
BEGIN
    PERFORM modak.require_owner(target);
    SELECT s.spill_oid INTO present FROM modak.spills s JOIN pg_inherits i ON i.inhrelid = s.spill_oid AND i.inhparent = target
    WHERE s.table_id = entry.table_id;
    IF FOUND THEN
        RETURN present::text;
    END IF;
    IF NOT EXISTS (
        SELECT FROM pg_partitioned_table p
        WHERE p.partrelid = target AND p.partstrat = 'r' AND p.partnatts = 1 AND p.partattrs[0] = entry.tier_attnum
    ) THEN
        RAISE EXCEPTION '% is not partitioned by range of its tier key', target
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT * INTO STRICT line FROM modak.cutline c WHERE c.table_id = entry.table_id;
    leaves := modak.lowest_leaf(target, entry.axis);
    IF leaves.in_the_way IS NOT NULL THEN
        RAISE EXCEPTION 'partition % is in the way of the spill partition', leaves.in_the_way
            USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Historical rows go into that partition; detach it first.';
    END IF;
    -- Never above the cut-line: a delta row there would be hidden by the heap's side of the seam.
    -- Nor above a leaf that hangs between detach and drop.
    ceiling := least(leaves.lowest, line.t, (
        SELECT min(p.lower_bound) FROM modak.partitions p WHERE p.table_id = entry.table_id AND p.state <> 'dropped'));
    IF line.t IS NULL OR line.first_floor > ceiling THEN
        RAISE EXCEPTION '% has no cut-line to spill below', target USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Create its first partition.';
    END IF;
    RETURN modak.attach_spill(entry.table_id, line.first_floor, ceiling);
END
$$;

CREATE FUNCTION modak.modak_disable_transparent_writes(target regclass) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms'
    SET client_min_messages = warning
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
BEGIN
    PERFORM modak.require_owner(target);
    PERFORM modak.drop_spill(entry.table_id);
    EXECUTE format('DROP TABLE IF EXISTS %s', modak.shadow_name(entry.table_id));
    DELETE FROM modak.spills s WHERE s.table_id = entry.table_id;
    RETURN FOUND;
END
$$;

CREATE FUNCTION modak.require_owner(target regclass) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = target AND pg_has_role(modak.caller(), c.relowner, 'USAGE')) THEN
        RAISE EXCEPTION 'must be owner of table %', target USING ERRCODE = 'insufficient_privilege';
    END IF;
END
$$;

CREATE FUNCTION public.modak_enable_transparent_writes(target regclass) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.modak_enable_transparent_writes(target) $$;

CREATE FUNCTION public.modak_disable_transparent_writes(target regclass) RETURNS boolean
    LANGUAGE sql AS $$ SELECT modak.modak_disable_transparent_writes(target) $$;
