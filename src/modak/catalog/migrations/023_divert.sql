-- Transparent writes beside a user's DEFAULT partition. Postgres puts there what no other partition takes, historical rows
-- among the rest; a trigger of ours turns those into the delta. It needs no DDL when partitions go: what it goes by is the
-- cut-line and whether a partition for the row is left, and there is no moment at which a reclaimed range is unguarded.

CREATE TABLE modak.diversions (
    table_id bigint PRIMARY KEY REFERENCES modak.tables ON DELETE CASCADE,
    leaf_oid oid NOT NULL,
    shape text NOT NULL
);
COMMENT ON TABLE modak.diversions IS 'DEFAULT partitions of users whose historical rows go to the delta';
COMMENT ON COLUMN modak.diversions.shape IS 'Which definition of columns and checks the shadow table was made from';

CREATE TABLE modak.cut_moves (
    table_id bigint PRIMARY KEY REFERENCES modak.tables ON DELETE CASCADE
);
COMMENT ON TABLE modak.cut_moves IS 'Rewritten when the cut-line moves, and by nobody else: a snapshot from before sees that it is outdated';

CREATE FUNCTION modak.note_cut_move() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE modak.cut_moves m SET table_id = m.table_id WHERE m.table_id = NEW.table_id;
    RETURN NULL;
END
$$;

CREATE TRIGGER note_cut_move AFTER UPDATE ON modak.cutline
    FOR EACH ROW WHEN (OLD.t IS DISTINCT FROM NEW.t) EXECUTE FUNCTION modak.note_cut_move();

CREATE FUNCTION modak.has_ended_since(successor xid) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    -- xmax of a row that our snapshot shows although another transaction has rewritten it; an xid is 32 bits of an xid8.
    SELECT successor <> '0' AND coalesce(pg_xact_status((near + gap - CASE WHEN gap < 2147483648 THEN 0 ELSE 4294967296 END)
        ::text::xid8) = 'committed', false)
    FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS near) n
    CROSS JOIN LATERAL (SELECT (successor::text::bigint - near) & 4294967295 AS gap) g
$$;

CREATE FUNCTION modak.default_shape(leaf oid, root oid) RETURNS text
    LANGUAGE sql STABLE
AS $$ SELECT concat_ws('/', modak.shape(leaf), modak.shape(root)) $$;

CREATE FUNCTION modak.make_default_shadow(of_table bigint, leaf oid) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    own text;
BEGIN
    -- Its own: the spill, where there is one too, may have its columns in another order.
    EXECUTE format('DROP TABLE IF EXISTS %s_default', modak.shadow_name(of_table));
    EXECUTE format('CREATE UNLOGGED TABLE %s_default (LIKE %s INCLUDING CONSTRAINTS INCLUDING GENERATED)',
        modak.shadow_name(of_table), leaf::regclass);
    -- What only this partition asks of its rows, its history need not keep to.
    FOR own IN
        SELECT format('DROP CONSTRAINT %I', c.conname)
        FROM pg_constraint c WHERE c.conrelid = leaf AND c.contype = 'c' AND c.coninhcount = 0
        UNION ALL
        SELECT format('ALTER COLUMN %I DROP NOT NULL', a.attname)
        FROM modak.tables t JOIN pg_attribute r ON r.attrelid = t.relid AND r.attnum > 0 AND NOT r.attnotnull
        JOIN pg_attribute a ON a.attrelid = leaf AND a.attname = r.attname AND a.attnotnull
        WHERE t.table_id = of_table
    LOOP
        EXECUTE format('ALTER TABLE %s_default %s', modak.shadow_name(of_table), own);
    END LOOP;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.make_default_shadow(bigint, oid) FROM PUBLIC;

CREATE FUNCTION modak.refuse_history(target regclass) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Postgres asks the policies of a row only after its BEFORE triggers: one that they turn into the delta it never asks.
    RAISE EXCEPTION 'row security of % applies to you', target USING ERRCODE = 'insufficient_privilege',
        HINT = 'The delta and the lake know no policies: only a role free of them can write historical rows.';
END
$$;
REVOKE EXECUTE ON FUNCTION modak.refuse_history(regclass) FROM PUBLIC;

CREATE FUNCTION modak.refuse_policed(target regclass) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- For the one trigger of spills that have not been attached anew since there are two, one of them for the policed.
    IF EXISTS (
        SELECT FROM pg_class c JOIN pg_roles r ON r.rolname = modak.caller()
        WHERE c.oid = target AND c.relrowsecurity AND NOT r.rolsuper AND NOT r.rolbypassrls
            AND (c.relforcerowsecurity OR NOT pg_has_role(r.oid, c.relowner, 'USAGE'))
    ) THEN
        PERFORM modak.refuse_history(target);
    END IF;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.refuse_policed(regclass) FROM PUBLIC;

CREATE FUNCTION modak.make_trigger(leaf regclass, called text, root oid, policed boolean, events text, action text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
BEGIN
    EXECUTE format('DROP TRIGGER IF EXISTS %I ON %s', called, leaf);
    -- Who writes is asked where it is known: inside a SECURITY DEFINER function it is not the role of the session.
    EXECUTE format('CREATE TRIGGER %I BEFORE %s ON %s FOR EACH ROW WHEN (%s pg_catalog.row_security_active(%L::oid))'
        ' EXECUTE FUNCTION %s', called, events, leaf, CASE WHEN policed THEN '' ELSE 'NOT' END, root, action);
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', leaf, called);
END
$$;
REVOKE EXECUTE ON FUNCTION modak.make_trigger(regclass, text, oid, boolean, text, text) FROM PUBLIC;

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

CREATE OR REPLACE FUNCTION modak.attach_spill(watched bigint, floor bigint, ceiling bigint) RETURNS text
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
    PERFORM modak.make_trigger(made, '~modak_spill', entry.relid, false, 'INSERT',
        format('modak.divert(%L, %L, %L, %L, %L, ''free'')', watched, keys, tier, floor, ceiling));
    PERFORM modak.make_trigger(made, '~modak_spill_policed', entry.relid, true, 'INSERT',
        format('modak.divert(%L, %L, %L, %L, %L, ''policed'')', watched, keys, tier, floor, ceiling));
    PERFORM modak.give_to_owner(made, entry.relid);
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (MINVALUE) TO (%L)',
        entry.relid::regclass, spill, modak.axis_literal(entry.axis, ceiling));
    PERFORM modak.make_shadow(watched, made);
    INSERT INTO modak.spills AS s VALUES (watched, made, floor, ceiling, modak.shape(made))
    ON CONFLICT (table_id) DO UPDATE SET spill_oid = excluded.spill_oid, upper_bound = excluded.upper_bound,
        shape = excluded.shape, updated_at = clock_timestamp();
    RETURN spill;
END
$$;

CREATE FUNCTION modak.divert_from_default() RETURNS trigger
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
    watched CONSTANT bigint := TG_ARGV[0];
    keys CONSTANT int2[] := TG_ARGV[1];
    tier CONSTANT int2 := TG_ARGV[2];
    root CONSTANT oid := TG_ARGV[3];
    -- The snapshot may be older than what is so by now; what functions of the system catalog say is not.
    outdated CONSTANT boolean := current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
    entry record;
    image record;
    key bigint;
    said text;
    was bigint;
    standing record;
    stands boolean;
    columns text;
    same text;
    shadow text;
    place record;
    kept boolean;
BEGIN
    SELECT t.schema_name, t.table_name, t.relid, t.mode, t.axis, c.t, c.retention_line, c.first_floor, d.shape,
        m.xmax AS moved_by
    INTO entry
    FROM modak.diversions d JOIN modak.tables t USING (table_id) JOIN modak.cutline c USING (table_id)
    JOIN pg_partitioned_table p ON p.partrelid = t.relid AND p.partdefid = TG_RELID
    LEFT JOIN modak.cut_moves m USING (table_id)
    WHERE d.table_id = watched AND d.leaf_oid = TG_RELID;
    IF NOT FOUND THEN
        IF outdated AND pg_partition_root(TG_RELID) = root AND NOT EXISTS (
            SELECT FROM pg_trigger g JOIN pg_inherits i ON i.inhrelid = g.tgrelid
            WHERE g.tgrelid = TG_RELID AND g.tgname = TG_NAME AND i.inhparent = root
        ) THEN
            RAISE EXCEPTION 'partition % of % has changed in the meantime', TG_RELID::regclass, root::regclass
                USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
        END IF;
        -- No longer the DEFAULT partition of a registered table: whatever it is, its rows are its own.
        RETURN NEW;
    END IF;
    SELECT * INTO image FROM modak.image_sql(TG_RELID, keys, tier, entry.axis);
    EXECUTE format('SELECT %s FROM (SELECT ($1).*) r', image.tier_key) INTO key USING NEW;
    IF TG_OP = 'UPDATE' THEN
        EXECUTE format('SELECT %s FROM (SELECT ($1).*) r', image.tier_key) INTO was USING OLD;
        IF was IS NOT DISTINCT FROM key THEN
            RETURN NEW;
        END IF;
    END IF;
    -- pg_partition_root looks past the snapshot of the transaction: a leaf that has gone since has none.
    SELECT p.partition_name, p.state, coalesce(pg_partition_root(p.leaf_oid) = pg_partition_root(entry.relid), false) AS attached,
        pg_table_is_visible(p.leaf_oid) IS NOT NULL AS there
    INTO standing
    FROM modak.partitions p
    WHERE p.table_id = watched AND p.state <> 'dropped' AND p.lower_bound <= key AND p.upper_bound > key;
    stands := FOUND;
    IF coalesce(key >= entry.t, true) THEN
        IF stands AND NOT standing.attached AND standing.there AND standing.state <> 'hot' THEN
            -- The cut-line is about to pass over it.
            RAISE EXCEPTION 'the partition of %.% for tier key % is on its way to the lake, but was detached',
                entry.schema_name, entry.table_name, modak.axis_literal(entry.axis, key)
                USING ERRCODE = 'object_in_use', HINT = 'Attach it again, or try again when the worker has noticed.';
        ELSIF outdated AND (stands AND NOT standing.attached OR modak.has_ended_since(entry.moved_by)) THEN
            RAISE EXCEPTION 'the partition of %.% for tier key % has changed in the meantime', entry.schema_name,
                entry.table_name, modak.axis_literal(entry.axis, key)
                USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
        END IF;
        RETURN NEW;
    END IF;
    said := CASE WHEN entry.axis <> 'integer' AND key = -9223372036854775808 THEN '-infinity'
        ELSE modak.axis_literal(entry.axis, key) END;
    IF TG_OP = 'UPDATE' THEN
        IF stands AND standing.attached THEN
            RETURN NEW;
        END IF;
        RAISE EXCEPTION 'an update cannot move a row of %.% from its DEFAULT partition to tier key %, which is in the lake',
            entry.schema_name, entry.table_name, said
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Delete the row and insert it anew.';
    END IF;

    IF entry.shape <> modak.default_shape(TG_RELID, entry.relid) THEN
        -- The first writer after a change of the table makes the shadow anew; others wait for its commit.
        PERFORM FROM modak.diversions d WHERE d.table_id = watched FOR UPDATE;
        PERFORM modak.make_default_shadow(watched, TG_RELID);
        UPDATE modak.diversions d SET shape = modak.default_shape(TG_RELID, entry.relid) WHERE d.table_id = watched;
    END IF;
    shadow := modak.shadow_name(watched) || '_default';
    SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FILTER (WHERE a.attgenerated = ''),
        string_agg(format('r.%1$I = s.%1$I', a.attname), ' AND ') FILTER (WHERE a.attnum = ANY (keys || tier))
    INTO columns, same
    FROM pg_attribute a WHERE a.attrelid = TG_RELID AND a.attnum > 0 AND NOT a.attisdropped;
    -- Only a real table can judge a row: NOT NULL, CHECK, generated columns and types hold because the row was in one.
    EXECUTE format('INSERT INTO %s AS r (%s) SELECT %s FROM (SELECT ($1).*) n RETURNING r.ctid AS at, %s AS pk, %s AS payload',
        shadow, columns, columns, image.pk, image.payload) INTO place USING NEW;
    IF entry.mode = 'mirrored' THEN
        -- A mirror follows what its DEFAULT partition had before it was diverted: such a row stays with the change stream.
        EXECUTE format('SELECT EXISTS (SELECT FROM %s s JOIN ONLY %s r ON %s WHERE s.ctid = $1)', shadow, TG_RELID::regclass, same)
            INTO kept USING place.at;
    END IF;
    EXECUTE format('DELETE FROM %s WHERE ctid = $1', shadow) USING place.at;
    IF kept THEN
        RETURN NEW;
    END IF;

    IF key < entry.first_floor THEN
        RAISE EXCEPTION 'no partition of %.% for tier key %', entry.schema_name, entry.table_name,
            said
            USING ERRCODE = 'check_violation', SCHEMA = entry.schema_name, TABLE = entry.table_name,
            DETAIL = format('Its history begins at %s.', modak.axis_literal(entry.axis, entry.first_floor)),
            HINT = 'Rows older than the first registered partition cannot be written: no read would show them.';
    ELSIF key < entry.retention_line THEN
        RAISE EXCEPTION 'tier key % lies below the retention line % of %.%', said,
            modak.axis_literal(entry.axis, entry.retention_line), entry.schema_name, entry.table_name
            USING ERRCODE = 'check_violation', SCHEMA = entry.schema_name, TABLE = entry.table_name,
            HINT = 'Rows below the retention line have expired; there is nothing left to add to.';
    END IF;
    IF stands AND standing.attached THEN
        RAISE EXCEPTION 'tier key % belongs into partition % of %.%', said,
            standing.partition_name, entry.schema_name, entry.table_name
            USING ERRCODE = 'check_violation', SCHEMA = entry.schema_name, TABLE = entry.table_name,
            HINT = format('Insert into %I.%I itself.', entry.schema_name, entry.table_name);
    ELSIF stands AND standing.there THEN
        RAISE EXCEPTION 'the partition of %.% for tier key % is about to be dropped', entry.schema_name, entry.table_name,
            said USING ERRCODE = 'object_in_use', HINT = 'Try again in a moment.';
    END IF;
    IF TG_NARGS > 4 THEN
        PERFORM modak.refuse_history(entry.relid);
    END IF;
    PERFORM modak.record_change(watched, place.pk, key, NULL, place.payload);
    IF current_setting('modak.explain', true) IN ('on', 'true', '1') THEN
        RAISE NOTICE 'modak: row % of %.% goes to the delta', place.pk, entry.schema_name, entry.table_name;
    END IF;
    RETURN NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.divert_from_default() FROM PUBLIC;

CREATE FUNCTION modak.stop_diverting(watched bigint) RETURNS boolean
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    leaf oid;
    attached boolean;
BEGIN
    DELETE FROM modak.diversions d WHERE d.table_id = watched RETURNING d.leaf_oid INTO leaf;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF EXISTS (SELECT FROM pg_class c WHERE c.oid = leaf) THEN
        SELECT EXISTS (SELECT FROM modak.tables t JOIN pg_inherits i ON i.inhparent = t.relid
            WHERE t.table_id = watched AND i.inhrelid = leaf) INTO attached;
        BEGIN
            EXECUTE format('DROP TRIGGER IF EXISTS "~modak_divert" ON %s', leaf::regclass);
            EXECUTE format('DROP TRIGGER IF EXISTS "~modak_divert_policed" ON %s', leaf::regclass);
        EXCEPTION WHEN insufficient_privilege OR lock_not_available THEN
            -- What was detached may be somebody else's by now, or read for long; there the triggers let every row pass.
            IF attached THEN
                RAISE;
            END IF;
        END;
    END IF;
    EXECUTE format('DROP TABLE IF EXISTS %s_default', modak.shadow_name(watched));
    RETURN true;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.stop_diverting(bigint) FROM PUBLIC;

CREATE FUNCTION modak.divert_default(watched bigint, leaf oid) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    entry modak.tables;
    keys int2[];
    tier int2;
    reader name;
BEGIN
    IF 2 = (
        SELECT count(*) FROM modak.diversions d JOIN pg_trigger g ON g.tgrelid = d.leaf_oid
        WHERE d.table_id = watched AND d.leaf_oid = leaf AND g.tgenabled = 'A'
            AND g.tgname IN ('~modak_divert', '~modak_divert_policed') AND g.tgfoid = 'modak.divert_from_default'::regproc
    ) THEN
        RETURN leaf::regclass;
    END IF;
    PERFORM modak.stop_diverting(watched);
    SELECT * INTO STRICT entry FROM modak.tables t WHERE t.table_id = watched;
    SELECT array_agg(own.attnum ORDER BY array_position(entry.pk_attnums, root.attnum))
            FILTER (WHERE root.attnum = ANY (entry.pk_attnums)),
        min(own.attnum) FILTER (WHERE root.attnum = entry.tier_attnum)
    INTO keys, tier
    FROM pg_attribute root JOIN pg_attribute own USING (attname)
    WHERE root.attrelid = entry.relid AND own.attrelid = leaf;
    IF entry.mode = 'mirrored' THEN
        -- As for capture: the look at what stands there already must not need a membership that can end.
        SELECT pg_get_userbyid(p.proowner) INTO reader FROM pg_proc p WHERE p.oid = 'modak.divert_from_default'::regproc
            AND NOT EXISTS (SELECT FROM pg_class c JOIN pg_roles r ON r.oid = p.proowner
                WHERE c.oid = leaf AND (r.rolsuper OR c.relowner = r.oid));
        IF reader IS NOT NULL THEN
            EXECUTE format('GRANT SELECT ON %s TO %I', leaf::regclass, reader);
        END IF;
    END IF;
    -- They sort last: the user's BEFORE triggers have had their say. Readers are not in their way, nor they in theirs.
    PERFORM modak.make_trigger(leaf, '~modak_divert', entry.relid, false, 'INSERT OR UPDATE',
        format('modak.divert_from_default(%L, %L, %L, %L)', watched, keys, tier, entry.relid));
    PERFORM modak.make_trigger(leaf, '~modak_divert_policed', entry.relid, true, 'INSERT OR UPDATE',
        format('modak.divert_from_default(%L, %L, %L, %L, ''policed'')', watched, keys, tier, entry.relid));
    PERFORM modak.make_default_shadow(watched, leaf);
    INSERT INTO modak.cut_moves VALUES (watched) ON CONFLICT DO NOTHING;
    INSERT INTO modak.diversions VALUES (watched, leaf, modak.default_shape(leaf, entry.relid));
    RETURN leaf::regclass;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.divert_default(bigint, oid) FROM PUBLIC;

CREATE OR REPLACE FUNCTION modak.modak_enable_transparent_writes(target regclass) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms'
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
    line modak.cutline;
    leaves record;
    ceiling bigint;
    present regclass;
    rest oid;
BEGIN
    PERFORM modak.require_owner(target);
    SELECT p.partdefid INTO rest FROM pg_partitioned_table p
    WHERE p.partrelid = target AND p.partstrat = 'r' AND p.partnatts = 1 AND p.partattrs[0] = entry.tier_attnum;
    IF NOT FOUND THEN
        RAISE EXCEPTION '% is not partitioned by range of its tier key', target
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT * INTO STRICT line FROM modak.cutline c WHERE c.table_id = entry.table_id;
    IF rest <> 0 THEN
        IF line.t IS NULL THEN
            RAISE EXCEPTION '% has no cut-line to spill below', target USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = 'Create its first partition.';
        ELSIF EXISTS (SELECT FROM pg_class c WHERE c.oid = rest AND c.relkind <> 'r') THEN
            RAISE EXCEPTION 'partition % is in the way of transparent writes: it is no plain table', rest::regclass
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Make the DEFAULT partition a plain table.';
        END IF;
        RETURN modak.divert_default(entry.table_id, rest);
    END IF;
    PERFORM modak.stop_diverting(entry.table_id);
    SELECT s.spill_oid INTO present FROM modak.spills s JOIN pg_inherits i ON i.inhrelid = s.spill_oid AND i.inhparent = target
    WHERE s.table_id = entry.table_id;
    IF FOUND THEN
        RETURN present::text;
    END IF;
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

CREATE OR REPLACE FUNCTION modak.modak_disable_transparent_writes(target regclass) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms'
    SET client_min_messages = warning
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
    diverted boolean;
BEGIN
    PERFORM modak.require_owner(target);
    diverted := modak.stop_diverting(entry.table_id);
    PERFORM modak.drop_spill(entry.table_id);
    EXECUTE format('DROP TABLE IF EXISTS %s', modak.shadow_name(entry.table_id));
    DELETE FROM modak.spills s WHERE s.table_id = entry.table_id;
    RETURN FOUND OR diverted;
END
$$;

-- What a statement touches: a DEFAULT partition takes the historical rows that an INSERT brings, or its trigger does.

ALTER TYPE modak.explained ADD ATTRIBUTE rest oid, ADD ATTRIBUTE diverts boolean;

CREATE OR REPLACE FUNCTION modak.explain_facts(relation regclass) RETURNS modak.explained
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    here modak.seam;
    at modak.explained;
    spilled_to bigint;
BEGIN
    SELECT t.relid, t.tier_attnum, s.spill_oid, s.upper_bound, nullif(p.partdefid, 0), d.leaf_oid IS NOT NULL
    INTO at.root, at.tier, at.spill, spilled_to, at.rest, at.diverts
    FROM modak.tables t LEFT JOIN modak.spills s USING (table_id)
    LEFT JOIN pg_partitioned_table p ON p.partrelid = t.relid
    LEFT JOIN modak.diversions d ON d.table_id = t.table_id AND d.leaf_oid = p.partdefid
    WHERE t.relid = relation OR t.relid IN (SELECT a FROM pg_partition_ancestors(relation) a);
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    here := modak.seam_of(at.root);
    at.name := here.name;
    at.mode := here.mode;
    at.axis := here.axis;
    at.hot_sql := modak.hot_sql(here, 'k');
    at.cold := CASE WHEN here.mode = 'mirrored' OR here.first_floor IS NULL THEN '{}' ELSE
        int8multirange(int8range(greatest(here.first_floor, here.retention_line), here.t)) - here.heap END;
    at.edge := modak.axis_literal(here.axis, upper(at.cold));
    -- The spill partition stands for the rows below it: a plan without it asks for none of them.
    at.edge_known := coalesce(spilled_to >= upper(at.cold), false);
    RETURN at;
END
$$;

CREATE OR REPLACE FUNCTION modak.explain_insert(at modak.explained, node jsonb) RETURNS text
    LANGUAGE plpgsql
AS $$
DECLARE
    aside CONSTANT text := CASE
        WHEN at.edge_known THEN 'through the spill partition to the delta, where insert means upsert'
        WHEN at.diverts THEN 'through the DEFAULT partition to the delta, where insert means upsert'
        WHEN at.rest IS NOT NULL THEN 'into the DEFAULT partition, where no read looks: use modak_upsert, or'
            ' modak_enable_transparent_writes'
        ELSE 'nowhere for want of a spill partition, and will be refused: use modak_upsert' END;
    value text;
    key bigint;
    hot boolean;
BEGIN
    IF isempty(at.cold) THEN
        RETURN format('%s: inserts into the heap.', at.name);
    END IF;
    -- Only a single row of constants shows its values in the plan; one row of VALUES is a Result with an output each.
    IF jsonb_array_length(node -> 'Plans') = 1 AND node #>> '{Plans,0,Node Type}' = 'Result'
        AND NOT node #> '{Plans,0}' ? 'Plans' THEN
        value := (regexp_match(node #> '{Plans,0,Output}' ->> at.tier - 1,
            '^(''[^'']*''::[a-z ]+([(][0-9][)][a-z ]*)?|-?[0-9]+)$'))[1];
    END IF;
    IF value IS NULL THEN
        RETURN format('%s: inserts rows from %s on into the heap; older rows go %s. Cannot tell which rows it has.',
            at.name, at.edge, aside);
    END IF;
    EXECUTE format('SELECT %s FROM (SELECT %s AS v) r', modak.axis_sql(at.axis, 'v'), value) INTO key;
    EXECUTE format('SELECT %s FROM (SELECT %L::bigint) x(k)', at.hot_sql, key) INTO hot;
    IF hot THEN
        RETURN format('%s: inserts into the heap.', at.name);
    ELSIF at.cold @> key THEN
        RETURN format('%s: the row lies below %s and goes %s.', at.name, at.edge, aside);
    ELSIF at.rest IS NOT NULL AND NOT at.diverts THEN
        RETURN format('%s: the row lies below the retention line or before the history of the table and goes %s.', at.name,
            aside);
    END IF;
    RETURN format('%s: the row lies below the retention line or before the history of the table, and will be refused.',
        at.name);
END
$$;
