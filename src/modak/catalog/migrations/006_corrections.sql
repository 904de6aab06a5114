-- Corrections: an upsert or a delete finds the tier of its row by itself. A row for which a leaf is attached is plain DML
-- of the caller; a row whose leaf is gone becomes a row of modak.delta, judged by a table of the same definition.
-- Three kinds of function: *_sql make text, those that act for the caller have the caller's rights and search_path (the
-- user's triggers run below them), those that touch the catalog are SECURITY DEFINER and check the caller themselves.
-- Bodies contain no backslash, because the caller's session decides how literals are read.

CREATE TYPE modak.seam AS (
    table_id bigint, name text, mode text, axis text, t bigint, retention_line bigint, first_floor bigint,
    heap int8multirange, busy int8multirange
);
COMMENT ON TYPE modak.seam IS 'Where rows of a table are now; heap: attached leaves, busy: leaves between detach and drop';

CREATE FUNCTION modak.leaf_range(leaf oid, axis text) RETURNS int8range
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET "TimeZone" = 'UTC' SET "DateStyle" = 'ISO, YMD'
AS $$
DECLARE
    bounds text[];
    ends bigint[];
    at bigint;
BEGIN
    SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), '^FOR VALUES FROM [(](.*)[)] TO [(](.*)[)]$') INTO bounds
    FROM pg_class c WHERE c.oid = leaf;
    IF bounds IS NULL THEN
        -- A DEFAULT partition covers nothing by itself: what it takes below the cut-line no reader would ever see.
        RETURN 'empty';
    END IF;
    FOR i IN 1..2 LOOP
        IF bounds[i] NOT IN ('MINVALUE', 'MAXVALUE') THEN
            EXECUTE format('SELECT %s FROM (SELECT (%s)::%s AS v) r', modak.axis_sql(axis, 'v'), bounds[i],
                CASE axis WHEN 'integer' THEN 'bigint' ELSE axis END) INTO at;
            ends[i] := at;
        END IF;
    END LOOP;
    RETURN int8range(ends[1], ends[2]);
END
$$;

CREATE FUNCTION modak.seam_of(target regclass) RETURNS modak.seam
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
    top CONSTANT oid := coalesce(pg_partition_root(target), target);
    here modak.seam;
BEGIN
    SELECT entry.table_id, format('%s.%s', entry.schema_name, entry.table_name), entry.mode, entry.axis,
        c.t, c.retention_line, c.first_floor
    INTO here FROM (SELECT) one LEFT JOIN modak.cutline c ON c.table_id = entry.table_id;
    -- pg_partition_root looks past the snapshot of the transaction: even under REPEATABLE READ a leaf that is being
    -- detached no longer has the root, and one that was dropped has none.
    WITH leaves AS MATERIALIZED (
        SELECT p.leaf_oid AS leaf, true AS recorded, int8range(p.lower_bound, p.upper_bound) AS span,
            coalesce(pg_partition_root(p.leaf_oid) = top, false) AS attached
        FROM modak.partitions p
        WHERE p.table_id = entry.table_id AND p.state <> 'dropped' AND num_nulls(p.lower_bound, p.upper_bound) < 2
        UNION ALL
        SELECT i.inhrelid, false, modak.leaf_range(i.inhrelid, entry.axis),
            coalesce(pg_partition_root(i.inhrelid) = top, false)
        FROM pg_inherits i
        WHERE i.inhparent = target
            AND i.inhrelid NOT IN (SELECT s.spill_oid FROM modak.spills s WHERE s.table_id = entry.table_id)
            AND i.inhrelid NOT IN (
                SELECT p.leaf_oid FROM modak.partitions p WHERE p.table_id = entry.table_id AND p.state <> 'dropped')
    )
    SELECT coalesce(range_agg(l.span) FILTER (WHERE l.attached), '{}'),
        coalesce(range_agg(l.span)
            FILTER (WHERE l.recorded AND NOT l.attached AND pg_table_is_visible(l.leaf) IS NOT NULL), '{}')
    INTO here.heap, here.busy FROM leaves l;
    RETURN here;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.seam_of(regclass) FROM PUBLIC;

CREATE FUNCTION modak.hot_sql(here modak.seam, key text) RETURNS text
    LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE WHEN here.mode = 'mirrored' THEN 'true' ELSE format(
        '(%1$s >= %2$L::bigint OR %3$L::int8multirange @> %1$s) AND %1$s >= %4$L::bigint', key,
        coalesce(here.t, -9223372036854775808), here.heap, coalesce(here.retention_line, -9223372036854775808)) END
$$;

CREATE FUNCTION modak.refuse_unless_cold(here modak.seam, keys bigint[]) RETURNS void
    LANGUAGE plpgsql
AS $$
DECLARE
    key bigint;
    said text;
BEGIN
    SELECT k INTO key FROM unnest(keys) k
    WHERE NOT coalesce(k < here.t AND k >= greatest(here.first_floor, here.retention_line)
        AND NOT here.heap @> k AND NOT here.busy @> k, false)
    ORDER BY k LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- The ends of a time axis stand for the infinities, which are no literal of it.
    said := CASE WHEN here.axis <> 'integer' AND key = -9223372036854775808 THEN '-infinity'
        WHEN here.axis <> 'integer' AND key = 9223372036854775807 THEN 'infinity'
        ELSE modak.axis_literal(here.axis, key) END;
    IF here.busy @> key THEN
        RAISE EXCEPTION 'the partition of % for tier key % is about to be dropped', here.name, said
            USING ERRCODE = 'object_in_use', HINT = 'Try again in a moment.';
    ELSIF key < here.first_floor THEN
        RAISE EXCEPTION 'no partition of % for tier key %', here.name, said USING ERRCODE = 'check_violation',
            DETAIL = format('Its history begins at %s.', modak.axis_literal(here.axis, here.first_floor)),
            HINT = 'Rows older than the first registered partition cannot be written.';
    ELSIF key < here.retention_line THEN
        RAISE EXCEPTION 'tier key % lies below the retention line % of %', said,
            modak.axis_literal(here.axis, here.retention_line), here.name USING ERRCODE = 'check_violation',
            HINT = 'Rows below the retention line have expired; there is nothing left to correct.';
    END IF;
    RAISE EXCEPTION 'the partition of % for tier key % has changed in the meantime', here.name, said
        USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
END
$$;
REVOKE EXECUTE ON FUNCTION modak.refuse_unless_cold(modak.seam, bigint[]) FROM PUBLIC;

CREATE FUNCTION modak.require_writer(target regclass, VARIADIC wanted text[]) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    right_to text;
BEGIN
    FOREACH right_to IN ARRAY wanted LOOP
        IF NOT has_table_privilege(modak.caller(), target, right_to) THEN
            RAISE EXCEPTION 'permission denied for table %', target USING ERRCODE = 'insufficient_privilege',
                HINT = format('A correction of a cold row needs %s on the table.', array_to_string(wanted, ' and '));
        END IF;
    END LOOP;
    IF EXISTS (
        SELECT FROM pg_class c JOIN pg_roles r ON r.rolname = modak.caller()
        WHERE c.oid = target AND c.relrowsecurity AND NOT r.rolsuper AND NOT r.rolbypassrls
            AND (c.relforcerowsecurity OR NOT pg_has_role(r.oid, c.relowner, 'USAGE'))
    ) THEN
        RAISE EXCEPTION 'row security of % applies to you', target USING ERRCODE = 'insufficient_privilege',
            HINT = 'The delta and the lake know no policies: only a role free of them can correct cold rows.';
    END IF;
END
$$;

-- The intake: a table of the root's definition into which the caller inserts cold rows, so that types, defaults, NOT
-- NULL, CHECK and generated columns are judged with the caller's rights; they leave it for the delta at once. Anybody may
-- insert who may write the root, and nobody ever sees another's rows, because none is committed.
CREATE TABLE modak.intakes (
    table_id bigint PRIMARY KEY REFERENCES modak.tables ON DELETE CASCADE,
    shape text NOT NULL
);

CREATE FUNCTION modak.intake_name(of_table bigint) RETURNS text
    LANGUAGE sql IMMUTABLE
AS $$ SELECT 'modak.intake_' || of_table $$;

CREATE FUNCTION modak.forget_intake() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
BEGIN
    EXECUTE format('DROP TABLE IF EXISTS %s', modak.intake_name(OLD.table_id));
    RETURN NULL;
END
$$;

CREATE TRIGGER forget_intake AFTER DELETE ON modak.tables FOR EACH ROW EXECUTE FUNCTION modak.forget_intake();

CREATE FUNCTION modak.guard_intake() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM modak.require_writer(TG_ARGV[0]::oid::regclass, 'INSERT', 'UPDATE');
    RETURN NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.guard_intake() FROM PUBLIC;

CREATE FUNCTION modak.next_identity(target oid, attribute int2) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- As INSERT does: who may insert draws the number, whatever rights the sequence itself has.
    PERFORM modak.registered(target);
    PERFORM modak.require_writer(target, 'INSERT');
    RETURN (
        SELECT nextval(pg_get_serial_sequence(target::regclass::text, a.attname))
        FROM pg_attribute a WHERE a.attrelid = target AND a.attnum = attribute AND a.attidentity <> ''
    );
END
$$;

CREATE FUNCTION modak.open_intake(target regclass) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
    intake CONSTANT text := modak.intake_name(entry.table_id);
BEGIN
    PERFORM modak.require_writer(target, 'INSERT', 'UPDATE');
    IF EXISTS (SELECT FROM modak.intakes i WHERE i.table_id = entry.table_id AND i.shape = modak.shape(target)) THEN
        RETURN intake;
    END IF;
    -- The first correction after a change of the table makes the intake anew; others wait for its commit.
    PERFORM pg_advisory_xact_lock(hashtextextended(intake, 0));
    IF EXISTS (SELECT FROM modak.intakes i WHERE i.table_id = entry.table_id AND i.shape = modak.shape(target)) THEN
        RETURN intake;
    END IF;
    EXECUTE format('DROP TABLE IF EXISTS %s', intake);
    EXECUTE format('CREATE UNLOGGED TABLE %s (LIKE %s INCLUDING CONSTRAINTS INCLUDING GENERATED)', intake, target);
    EXECUTE format('CREATE TRIGGER guard_intake BEFORE INSERT ON %s FOR EACH STATEMENT'
        ' EXECUTE FUNCTION modak.guard_intake(%L)', intake, target::oid);
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER guard_intake', intake);
    EXECUTE format('GRANT SELECT, INSERT ON %s TO PUBLIC', intake);
    INSERT INTO modak.intakes AS i VALUES (entry.table_id, modak.shape(target))
    ON CONFLICT (table_id) DO UPDATE SET shape = excluded.shape;
    RETURN intake;
END
$$;

CREATE FUNCTION modak.record_sql(of_table bigint) RETURNS text
    LANGUAGE sql IMMUTABLE
AS $$
    -- The set version of modak.record_change, over changed (pk, tier_key, payload). Ordered, so that two callers meet
    -- the same rows in the same order.
    SELECT format('INSERT INTO modak.delta AS d (table_id, pk, tier_key, op, payload)'
        ' SELECT %s, c.pk, c.tier_key, CASE WHEN c.payload IS NULL THEN 2 ELSE 1 END, c.payload'
        ' FROM changed c ORDER BY c.pk COLLATE "C", c.tier_key'
        ' ON CONFLICT (table_id, pk, tier_key) DO UPDATE SET op = excluded.op, payload = excluded.payload,'
        ' version = nextval(''modak.delta_version''), xid = pg_current_xact_id(), updated_at = clock_timestamp(),'
        ' folded_into = NULL, folded_generation = NULL', of_table)
$$;

CREATE FUNCTION modak.take_in(target regclass, places tid[]) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET "TimeZone" = 'UTC'
    SET "DateStyle" = 'ISO, YMD'
    SET "IntervalStyle" = 'iso_8601'
    SET extra_float_digits = 1
    SET bytea_output = 'hex'
    SET row_security = off
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
    intake CONSTANT text := modak.intake_name(entry.table_id);
    here CONSTANT modak.seam := modak.seam_of(target);
    keys int2[];
    tier int2;
    image record;
    at bigint[];
    taken bigint;
BEGIN
    PERFORM modak.require_writer(target, 'INSERT', 'UPDATE');
    SELECT array_agg(own.attnum ORDER BY array_position(entry.pk_attnums, root.attnum))
            FILTER (WHERE root.attnum = ANY (entry.pk_attnums)),
        min(own.attnum) FILTER (WHERE root.attnum = entry.tier_attnum)
    INTO keys, tier
    FROM pg_attribute root JOIN pg_attribute own USING (attname)
    WHERE root.attrelid = target AND own.attrelid = intake::regclass;
    SELECT * INTO image FROM modak.image_sql(intake::regclass, keys, tier, entry.axis);
    EXECUTE format('SELECT array_agg(%s) FROM %s r WHERE r.ctid = ANY ($1)', image.tier_key, intake) INTO at USING places;
    PERFORM modak.refuse_unless_cold(here, at);
    EXECUTE format('WITH changed AS ('
        'DELETE FROM %s r WHERE r.ctid = ANY ($1) RETURNING %s AS pk, %s AS tier_key, %s AS payload) %s', intake, image.pk, image.tier_key, image.payload, modak.record_sql(entry.table_id)) USING places;
    GET DIAGNOSTICS taken = ROW_COUNT;
    RETURN taken;
END
$$;

CREATE FUNCTION modak.plain_type(of oid, modifier integer) RETURNS text
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    base record;
BEGIN
    LOOP
        SELECT t.typbasetype, t.typtypmod INTO base FROM pg_type t WHERE t.oid = of AND t.typtype = 'd';
        EXIT WHEN NOT FOUND;
        of := base.typbasetype;
        modifier := greatest(modifier, base.typtypmod);
    END LOOP;
    RETURN format_type(of, modifier);
END
$$;

CREATE FUNCTION modak.bury(target regclass, keys jsonb) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET "TimeZone" = 'UTC'
    SET "DateStyle" = 'ISO, YMD'
    SET "IntervalStyle" = 'iso_8601'
    SET extra_float_digits = 1
    SET bytea_output = 'hex'
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
    here CONSTANT modak.seam := modak.seam_of(target);
    typed text;
    image record;
    at bigint[];
    buried bigint;
BEGIN
    PERFORM modak.require_writer(target, 'DELETE');
    -- Domains by their base type: their checks are somebody's own functions.
    SELECT string_agg(format('%I %s', a.attname, modak.plain_type(a.atttypid, a.atttypmod)), ', ') INTO typed
    FROM pg_attribute a WHERE a.attrelid = target AND a.attnum = ANY (entry.pk_attnums || entry.tier_attnum);
    SELECT * INTO image FROM modak.image_sql(target, entry.pk_attnums, entry.tier_attnum, entry.axis);
    EXECUTE format('SELECT array_agg(%s) FROM jsonb_to_recordset($1) AS r(%s)', image.tier_key, typed) INTO at USING keys;
    PERFORM modak.refuse_unless_cold(here, at);
    EXECUTE format('WITH changed AS ('
        'SELECT %s AS pk, %s AS tier_key, NULL::jsonb AS payload FROM jsonb_to_recordset($1) AS r(%s)) %s',
        image.pk, image.tier_key, typed, modak.record_sql(entry.table_id)) USING keys;
    GET DIAGNOSTICS buried = ROW_COUNT;
    RETURN buried;
END
$$;

CREATE FUNCTION modak.still_in_heap(target regclass, touched int8multirange) RETURNS boolean
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT here.mode = 'mirrored' OR touched IS NULL OR touched <@ (here.heap + int8multirange(int8range(here.t, NULL)))
    FROM modak.seam_of(target) here
$$;

CREATE TYPE modak.correction AS (
    target regclass, name text, axis text, tier text, identity text[], tier_sql text, hot_sql text, conflict text
);
COMMENT ON TYPE modak.correction IS 'What a statement of the caller has to know about the table that it corrects';

CREATE FUNCTION modak.correction_of(target regclass) RETURNS modak.correction
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
    here CONSTANT modak.seam := modak.seam_of(target);
    at modak.correction;
    key int2[];
BEGIN
    IF NOT has_table_privilege(modak.caller(), target, 'SELECT, INSERT, UPDATE, DELETE') THEN
        RAISE EXCEPTION 'permission denied for table %', target USING ERRCODE = 'insufficient_privilege';
    END IF;
    SELECT target, here.name, here.axis, min(a.attname) FILTER (WHERE a.attnum = entry.tier_attnum),
        array_agg(a.attname::text ORDER BY array_position(entry.pk_attnums || entry.tier_attnum, a.attnum))
    INTO at
    FROM pg_attribute a WHERE a.attrelid = target AND a.attnum = ANY (entry.pk_attnums || entry.tier_attnum);
    at.tier_sql := modak.axis_sql(here.axis, at.tier);
    at.hot_sql := modak.hot_sql(here, 'q."!k"');
    SELECT (i.indkey::int2[])[0:i.indnkeyatts - 1] INTO key FROM pg_index i WHERE i.indrelid = target AND i.indisprimary;
    SELECT format('ON CONFLICT (%s) DO %s',
        string_agg(quote_ident(a.attname), ', ') FILTER (WHERE a.attnum = ANY (key)),
        coalesce('UPDATE SET ' || string_agg(format('%1$I = excluded.%1$I', a.attname), ', ')
            FILTER (WHERE a.attnum <> ALL (key) AND a.attidentity <> 'a' AND a.attgenerated = ''), 'NOTHING'))
    INTO at.conflict
    FROM pg_attribute a WHERE a.attrelid = target AND a.attnum > 0 AND NOT a.attisdropped;
    RETURN at;
END
$$;

CREATE FUNCTION modak.routed_sql(at modak.correction, source text) RETURNS text
    LANGUAGE sql IMMUTABLE
AS $$
    -- The rows of a source (text for FROM, aliased r) with the place of each on the axis and whether it is the heap's.
    SELECT format('SELECT q.*, %s AS "!hot" FROM (SELECT r.*, %s AS "!k" FROM %s) q', at.hot_sql, at.tier_sql, source)
$$;

CREATE FUNCTION modak.typed_columns(target regclass, given text[]) RETURNS text
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    named text;
    a pg_attribute;
    typed text[];
BEGIN
    FOREACH named IN ARRAY given LOOP
        SELECT * INTO a FROM pg_attribute c
        WHERE c.attrelid = target AND c.attname = named AND c.attnum > 0 AND NOT c.attisdropped;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'column "%" of % does not exist', named, target USING ERRCODE = 'undefined_column',
                HINT = (
                    SELECT format('Its columns are %s.', string_agg(quote_ident(c.attname), ', ' ORDER BY c.attnum))
                    FROM pg_attribute c WHERE c.attrelid = target AND c.attnum > 0 AND NOT c.attisdropped
                );
        ELSIF a.attgenerated <> '' THEN
            RAISE EXCEPTION 'column "%" of % is generated', named, target USING ERRCODE = 'generated_always',
                HINT = 'Leave it out: its value follows from the other columns.';
        END IF;
        typed := typed || format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod));
    END LOOP;
    RETURN array_to_string(typed, ', ');
END
$$;

CREATE FUNCTION modak.defaults_sql(target regclass, given text[], OUT columns text, OUT expressions text)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    -- Written out for each statement: as defaults of the intake they would tie the sequences of the table to it, and no
    -- DROP TABLE would go through any more.
    SELECT coalesce(string_agg(', ' || quote_ident(a.attname), '' ORDER BY a.attnum), ''),
        coalesce(string_agg(', ' || CASE WHEN a.attidentity <> ''
            THEN format('modak.next_identity(%s::oid, %s::int2)', target::oid, a.attnum)
            ELSE pg_get_expr(d.adbin, d.adrelid) END, '' ORDER BY a.attnum), '')
    FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = target AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
        AND a.attname <> ALL (given) AND (a.attidentity <> '' OR d.adbin IS NOT NULL)
$$;

CREATE FUNCTION modak.refuse_twice(at modak.correction, source text, input jsonb) RETURNS void
    LANGUAGE plpgsql
AS $$
DECLARE
    columns CONSTANT text := (SELECT string_agg(format('r.%I', i), ', ') FROM unnest(at.identity) i);
    twice text;
BEGIN
    EXECUTE format('SELECT concat_ws('', '', %1$s) FROM %2$s WHERE num_nulls(%1$s) = 0'
        ' GROUP BY %1$s HAVING count(*) > 1 LIMIT 1', columns, source) INTO twice USING input;
    IF twice IS NOT NULL THEN
        RAISE EXCEPTION 'key (%) = (%) of % comes more than once', array_to_string(at.identity, ', '), twice, at.name
            USING ERRCODE = 'cardinality_violation', HINT = 'Give each key once.';
    END IF;
END
$$;

CREATE FUNCTION modak.narrate(name text, tier text, n bigint) RETURNS void
    LANGUAGE plpgsql
AS $$
BEGIN
    IF n > 0 AND current_setting('modak.explain', true) IN ('on', 'true', '1') THEN
        RAISE NOTICE 'modak: % of % to the %', CASE n WHEN 1 THEN '1 row' ELSE n || ' rows' END, name,
            tier;
    END IF;
END
$$;

CREATE FUNCTION modak.upsert_source(
    at modak.correction, given text[], source text, input jsonb, OUT heap bigint, OUT delta bigint
)
    LANGUAGE plpgsql
AS $$
DECLARE
    -- The input is $1 of the source. One statement reads it for both tiers, so that a source which changes meanwhile is
    -- seen at one point.
    routed CONSTANT text := modak.routed_sql(at, source);
    columns CONSTANT text := (SELECT string_agg(quote_ident(g), ', ') FROM unnest(given) g);
    rest CONSTANT record := modak.defaults_sql(at.target, given);
    counted record;
    places tid[];
BEGIN
    IF at.tier <> ALL (given) THEN
        RAISE EXCEPTION 'tier key column "%" of % is missing', at.tier, at.name
            USING ERRCODE = 'not_null_violation', HINT = 'The tier key decides where the row belongs.';
    END IF;
    EXECUTE format('SELECT count(*) FILTER (WHERE s."!hot") AS hot, count(*) FILTER (WHERE NOT s."!hot") AS cold,'
        ' count(*) FILTER (WHERE s."!hot" IS NULL) AS nowhere FROM (%s) s', routed) INTO counted USING input;
    IF counted.nowhere > 0 THEN
        RAISE EXCEPTION 'tier key column "%" of % must not be null', at.tier, at.name
            USING ERRCODE = 'not_null_violation', HINT = 'The tier key decides where the row belongs.';
    END IF;
    EXECUTE format('WITH s AS MATERIALIZED (%s)%s%s SELECT %s, %s', routed,
        CASE WHEN counted.hot > 0 THEN format(
            ', h AS (INSERT INTO %s (%s) OVERRIDING SYSTEM VALUE SELECT %s FROM s%s %s RETURNING 1)',
            at.target, columns, columns, CASE WHEN counted.cold > 0 THEN ' WHERE s."!hot"' END, at.conflict) END,
        CASE WHEN counted.cold > 0 THEN format(
            ', c AS (INSERT INTO %s AS i (%s%s) SELECT %s%s FROM s%s RETURNING i.ctid)',
            modak.open_intake(at.target), columns, rest.columns, columns, rest.expressions,
            CASE WHEN counted.hot > 0 THEN ' WHERE NOT s."!hot"' END) END,
        CASE WHEN counted.hot > 0 THEN '(SELECT count(*) FROM h)' ELSE '0' END,
        CASE WHEN counted.cold > 0 THEN '(SELECT array_agg(c.ctid) FROM c)' ELSE 'NULL::tid[]' END)
        INTO heap, places USING input;
    delta := CASE WHEN counted.cold > 0 THEN modak.take_in(at.target, places) ELSE 0 END;
    PERFORM modak.narrate(at.name, 'heap', heap);
    PERFORM modak.narrate(at.name, 'delta', delta);
END
$$;

CREATE FUNCTION modak.delete_source(at modak.correction, source text, input jsonb, OUT heap bigint, OUT delta bigint)
    LANGUAGE plpgsql
AS $$
DECLARE
    routed CONSTANT text := modak.routed_sql(at, source);
    counted record;
    cold jsonb;
    touched int8multirange;
    strayed boolean;
BEGIN
    EXECUTE format('SELECT count(*) FILTER (WHERE num_nulls(%s) > 0) AS nowhere,'
        ' min(s.%2$I) FILTER (WHERE s."!hot")::text AS low, max(s.%2$I) FILTER (WHERE s."!hot")::text AS high'
        ' FROM (%3$s) s',
        (SELECT string_agg(format('s.%I', i), ', ') FROM unnest(at.identity) i), at.tier, routed) INTO counted USING input;
    IF counted.nowhere > 0 THEN
        RAISE EXCEPTION 'key columns (%) of % must not be null', array_to_string(at.identity, ', '), at.name
            USING ERRCODE = 'not_null_violation';
    END IF;
    -- The bounds are constants, so that the planner sees, and locks, only the leaves which the keys are in.
    EXECUTE format('WITH s AS MATERIALIZED (%s)%s SELECT %s,'
        ' (SELECT jsonb_agg(jsonb_build_object(%s)) FROM s WHERE NOT s."!hot"),'
        ' (SELECT range_agg(int8range(s."!k", s."!k", ''[]'')) FROM s WHERE s."!hot" AND s."!k" < 9223372036854775807),'
        ' EXISTS (SELECT FROM s WHERE s."!hot" AND (s.%I BETWEEN %L AND %L) IS NOT TRUE)', routed,
        CASE WHEN counted.low IS NOT NULL THEN format(
            ', h AS (DELETE FROM %s t USING s WHERE s."!hot" AND t.%I BETWEEN %L AND %L AND %s RETURNING 1)',
            at.target, at.tier, counted.low, counted.high,
            (SELECT string_agg(format('t.%1$I = s.%1$I', i), ' AND ') FROM unnest(at.identity) i)) END,
        CASE WHEN counted.low IS NOT NULL THEN '(SELECT count(*) FROM h)' ELSE '0' END,
        (SELECT string_agg(format('%1$L, s.%1$I', i), ', ') FROM unnest(at.identity) i),
        at.tier, counted.low, counted.high)
        INTO heap, cold, touched, strayed USING input;
    delta := CASE WHEN cold IS NULL THEN 0 ELSE modak.bury(at.target, cold) END;
    -- A leaf that was detached after it was looked for, or a source that changed: the statement did not see those rows.
    IF strayed OR NOT modak.still_in_heap(at.target, touched) THEN
        RAISE EXCEPTION 'a partition of % left the heap in the meantime', at.name
            USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
    END IF;
    PERFORM modak.narrate(at.name, 'heap', heap);
    PERFORM modak.narrate(at.name, 'delta', delta);
END
$$;

CREATE FUNCTION modak.require_objects(input jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF jsonb_typeof(input) IS DISTINCT FROM 'array' OR jsonb_path_exists(input, 'strict $[*] ? (@.type() != "object")') THEN
        RAISE EXCEPTION 'expected a JSON array of objects' USING ERRCODE = 'invalid_parameter_value',
            HINT = 'One object for each row, column name to value.';
    END IF;
END
$$;

CREATE FUNCTION modak.modak_upsert_rows(target regclass, row_images jsonb, OUT heap bigint, OUT delta bigint)
    LANGUAGE plpgsql
AS $$
DECLARE
    at CONSTANT modak.correction := modak.correction_of(target);
    sets jsonb;
    columns jsonb;
    given text[];
    typed text;
    part record;
BEGIN
    PERFORM modak.require_objects(row_images);
    heap := 0;
    delta := 0;
    -- A column left out takes its default, so rows that leave out different columns are different statements.
    SELECT jsonb_agg(DISTINCT to_jsonb(ARRAY(SELECT jsonb_object_keys(e)))) INTO sets
    FROM jsonb_array_elements(row_images) e;
    FOR columns IN SELECT jsonb_array_elements(sets) LOOP
        PERFORM modak.typed_columns(target, ARRAY(SELECT jsonb_array_elements_text(columns)));
    END LOOP;
    IF jsonb_array_length(row_images) > 1 THEN
        PERFORM modak.refuse_twice(at,
            format('jsonb_to_recordset($1) AS r(%s)', modak.typed_columns(target, at.identity)), row_images);
    END IF;
    FOR columns IN SELECT jsonb_array_elements(sets) LOOP
        given := ARRAY(SELECT jsonb_array_elements_text(columns));
        typed := modak.typed_columns(target, given);
        part := modak.upsert_source(at, given, CASE jsonb_array_length(sets)
            WHEN 1 THEN format('jsonb_to_recordset($1) AS r(%s)', typed)
            ELSE format('(SELECT x.* FROM jsonb_array_elements($1) e, jsonb_to_record(e) AS x(%s)'
                ' WHERE ARRAY(SELECT jsonb_object_keys(e)) = %L::text[]) AS r', typed, given)
            END, row_images);
        heap := heap + part.heap;
        delta := delta + part.delta;
    END LOOP;
END
$$;

CREATE FUNCTION modak.modak_upsert(target regclass, row_image jsonb) RETURNS text
    LANGUAGE plpgsql
AS $$
DECLARE
    done CONSTANT record := modak.modak_upsert_rows(target, jsonb_build_array(row_image));
BEGIN
    RETURN CASE WHEN done.delta > 0 THEN 'delta' ELSE 'heap' END;
END
$$;

CREATE FUNCTION modak.source_sql(at modak.correction, source regclass, keys text[]) RETURNS text
    LANGUAGE sql STABLE
AS $$
    -- Key columns in the target's own types, because they decide before the row is there. Only the tier key takes its
    -- precision too: a cast to varchar(3) would cut off what does not fit.
    SELECT format('(SELECT %s FROM %s s) AS r', string_agg(CASE
        WHEN o.attname = ANY (keys) THEN format('CAST(s.%1$I AS %2$s) AS %1$I', o.attname,
            format_type(a.atttypid, CASE WHEN o.attname = at.tier THEN a.atttypmod ELSE -1 END))
        ELSE format('s.%I', o.attname) END, ', '), source)
    FROM pg_catalog.pg_attribute o JOIN pg_catalog.pg_attribute a ON a.attrelid = at.target AND a.attname = o.attname
    WHERE o.attrelid = source AND o.attnum > 0 AND NOT o.attisdropped
$$;

CREATE FUNCTION modak.columns_of(source regclass) RETURNS text[]
    LANGUAGE sql STABLE
AS $$
    SELECT coalesce(array_agg(a.attname::text ORDER BY a.attnum), '{}') FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = source AND a.attnum > 0 AND NOT a.attisdropped
$$;

CREATE FUNCTION modak.modak_upsert_from(target regclass, source regclass, OUT heap bigint, OUT delta bigint)
    LANGUAGE plpgsql
AS $$
DECLARE
    at CONSTANT modak.correction := modak.correction_of(target);
    given CONSTANT text[] := modak.columns_of(source);
    rows_sql CONSTANT text := modak.source_sql(at, source, ARRAY[at.tier]);
BEGIN
    PERFORM modak.typed_columns(target, given);
    IF at.identity <@ given THEN
        PERFORM modak.refuse_twice(at, rows_sql, NULL);
    END IF;
    SELECT u.heap, u.delta INTO heap, delta FROM modak.upsert_source(at, given, rows_sql, NULL) u;
END
$$;

CREATE FUNCTION modak.require_key(at modak.correction, given text[]) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    named text;
BEGIN
    FOREACH named IN ARRAY given || at.identity LOOP
        IF named <> ALL (at.identity) THEN
            RAISE EXCEPTION 'column "%" is no part of the key of %', named, at.name USING ERRCODE = 'undefined_column',
                HINT = format('The key is (%s).', array_to_string(at.identity, ', '));
        ELSIF named <> ALL (given) THEN
            RAISE EXCEPTION 'key column "%" of % is missing', named, at.name USING ERRCODE = 'not_null_violation',
                HINT = format('The key is (%s).', array_to_string(at.identity, ', '));
        END IF;
    END LOOP;
END
$$;

CREATE FUNCTION modak.modak_delete_rows(target regclass, keys jsonb, OUT heap bigint, OUT delta bigint)
    LANGUAGE plpgsql
AS $$
DECLARE
    at CONSTANT modak.correction := modak.correction_of(target);
    rows_sql CONSTANT text := format('jsonb_to_recordset($1) AS r(%s)', modak.typed_columns(target, at.identity));
BEGIN
    PERFORM modak.require_objects(keys);
    PERFORM modak.require_key(at, g.given)
    FROM (SELECT DISTINCT ARRAY(SELECT jsonb_object_keys(e)) AS given FROM jsonb_array_elements(keys) e) g;
    PERFORM modak.refuse_twice(at, rows_sql, keys);
    SELECT d.heap, d.delta INTO heap, delta FROM modak.delete_source(at, rows_sql, keys) d;
END
$$;

CREATE FUNCTION modak.modak_delete_from(target regclass, source regclass, OUT heap bigint, OUT delta bigint)
    LANGUAGE plpgsql
AS $$
DECLARE
    at CONSTANT modak.correction := modak.correction_of(target);
    rows_sql CONSTANT text := modak.source_sql(at, source, at.identity);
BEGIN
    -- Whole rows will do as well: columns beside the key are read past.
    PERFORM modak.typed_columns(target, modak.columns_of(source));
    PERFORM modak.require_key(at,
        ARRAY(SELECT c FROM unnest(modak.columns_of(source)) c WHERE c = ANY (at.identity)));
    PERFORM modak.refuse_twice(at, rows_sql, NULL);
    SELECT d.heap, d.delta INTO heap, delta FROM modak.delete_source(at, rows_sql, NULL) d;
END
$$;

CREATE FUNCTION modak.delete_one(target regclass, key jsonb, tier_key jsonb, kind text) RETURNS text
    LANGUAGE plpgsql
AS $$
DECLARE
    at CONSTANT modak.correction := modak.correction_of(target);
    rest CONSTANT text[] := array_remove(at.identity, at.tier);
    agrees boolean;
    done record;
BEGIN
    IF NOT (at.axis, kind) IN (('integer', 'bigint'), ('date', 'date'), ('timestamp', 'date'), ('timestamp', 'timestamp'),
        ('timestamp', 'timestamptz'), ('timestamptz', 'date'), ('timestamptz', 'timestamp'), ('timestamptz', 'timestamptz'))
        AND kind <> 'text' THEN
        RAISE EXCEPTION 'tier key column "%" of % is no %', at.tier, at.name, kind
            USING ERRCODE = 'datatype_mismatch', HINT = format('Give a value of type %s.', at.axis);
    END IF;
    IF jsonb_typeof(key) IS DISTINCT FROM 'object' THEN
        IF cardinality(rest) > 1 THEN
            RAISE EXCEPTION 'the key of % has the columns (%)', at.name, array_to_string(rest, ', ')
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Give a JSON object, column name to value.';
        END IF;
        key := jsonb_build_object(coalesce(rest[1], at.tier), key);
    END IF;
    IF key ? at.tier THEN
        EXECUTE format('SELECT a.%1$I IS NOT DISTINCT FROM b.%1$I'
            ' FROM jsonb_to_record($1) AS a(%2$s), jsonb_to_record($2) AS b(%2$s)',
            at.tier, modak.typed_columns(target, ARRAY[at.tier]))
            INTO agrees USING key, jsonb_build_object(at.tier, tier_key);
        IF NOT agrees THEN
            RAISE EXCEPTION 'the key names tier key %, the third argument %', key ->> at.tier, tier_key #>> '{}'
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Both name the same row: they must agree.';
        END IF;
    END IF;
    done := modak.modak_delete_rows(target, jsonb_build_array(key || jsonb_build_object(at.tier, tier_key)));
    RETURN CASE WHEN done.delta > 0 THEN 'delta' ELSE 'heap' END;
END
$$;

CREATE FUNCTION modak.modak_delete(target regclass, key jsonb, tier_key bigint) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.delete_one(target, key, to_jsonb(tier_key), 'bigint') $$;
CREATE FUNCTION modak.modak_delete(target regclass, key jsonb, tier_key date) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.delete_one(target, key, to_jsonb(tier_key), 'date') $$;
CREATE FUNCTION modak.modak_delete(target regclass, key jsonb, tier_key timestamp) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.delete_one(target, key, to_jsonb(tier_key), 'timestamp') $$;
CREATE FUNCTION modak.modak_delete(target regclass, key jsonb, tier_key timestamptz) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.delete_one(target, key, to_jsonb(tier_key), 'timestamptz') $$;
-- A quoted literal has no type of its own; it means what it would mean as a value of the tier key column.
CREATE FUNCTION modak.modak_delete(target regclass, key jsonb, tier_key text) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.delete_one(target, key, to_jsonb(tier_key), 'text') $$;

-- What a statement touches, told from its plan.

CREATE TYPE modak.explained AS (
    root oid, name text, mode text, axis text, tier int2, spill oid, cold int8multirange, edge text, edge_known boolean,
    hot_sql text
);

CREATE FUNCTION modak.explain_facts(relation regclass) RETURNS modak.explained
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    here modak.seam;
    at modak.explained;
    spilled_to bigint;
BEGIN
    SELECT t.relid, t.tier_attnum, s.spill_oid, s.upper_bound INTO at.root, at.tier, at.spill, spilled_to
    FROM modak.tables t LEFT JOIN modak.spills s USING (table_id)
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

CREATE FUNCTION modak.explain_insert(at modak.explained, node jsonb) RETURNS text
    LANGUAGE plpgsql
AS $$
DECLARE
    into_spill CONSTANT text := CASE WHEN at.edge_known
        THEN 'through the spill partition to the delta, where insert means upsert'
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
            at.name, at.edge, into_spill);
    END IF;
    EXECUTE format('SELECT %s FROM (SELECT %s AS v) r', modak.axis_sql(at.axis, 'v'), value) INTO key;
    EXECUTE format('SELECT %s FROM (SELECT %L::bigint) x(k)', at.hot_sql, key) INTO hot;
    IF hot THEN
        RETURN format('%s: inserts into the heap.', at.name);
    ELSIF at.cold @> key THEN
        RETURN format('%s: the row lies below %s and goes %s.', at.name, at.edge, into_spill);
    END IF;
    RETURN format('%s: the row lies below the retention line or before the history of the table, and will be refused.',
        at.name);
END
$$;

CREATE FUNCTION modak.explain_touch(at modak.explained, writes boolean, in_spill boolean, in_leaves boolean) RETURNS text
    LANGUAGE sql STABLE
AS $$
    SELECT at.name || ': ' || CASE
        WHEN at.mode = 'mirrored' THEN does || ' the heap; the lake follows it.'
        WHEN isempty(at.cold) THEN does || ' the heap, which holds every row.'
        WHEN NOT at.edge_known THEN
            format('%s the heap only; cannot tell whether it asks for rows below %s, which are in the lake%s',
                does, at.edge, instead)
        WHEN NOT in_spill THEN
            format('%s the heap only; it asks for nothing below %s, so the lake is not needed.', does, at.edge)
        WHEN in_leaves THEN
            format('%s heap rows only; it may also ask for rows below %s, which are in the lake%s', does, at.edge, instead)
        ELSE format('finds no row in the heap: it asks only for rows below %s, which are in the lake%s', at.edge, instead)
    END
    FROM (SELECT CASE WHEN writes THEN 'changes' ELSE 'reads' END AS does, CASE WHEN writes
        THEN ' and will not be changed: use modak_upsert or modak_delete.'
        ELSE ' and will be missing: use modak-worker sql or modak.read.' END AS instead) w
$$;

CREATE FUNCTION modak.modak_explain(statement text) RETURNS SETOF text
    LANGUAGE plpgsql
AS $$
DECLARE
    plan jsonb;
    found record;
    at modak.explained;
    told boolean := false;
BEGIN
    BEGIN
        -- A loop over a query is a cursor, and no cursor opens over two statements: the parser itself keeps a second one
        -- from running.
        FOR plan IN EXECUTE 'EXPLAIN (FORMAT JSON, COSTS OFF, VERBOSE) ' || statement LOOP
        END LOOP;
        -- Planning may call functions that claim to be immutable: what they did is taken back.
        RAISE EXCEPTION USING ERRCODE = 'MDK05';
    EXCEPTION WHEN SQLSTATE 'MDK05' THEN
        NULL;
    WHEN syntax_error OR invalid_cursor_definition THEN
        RAISE EXCEPTION 'cannot explain this: %', SQLERRM USING ERRCODE = 'syntax_error',
            HINT = 'modak_explain takes one SELECT, INSERT, UPDATE, DELETE or MERGE, without EXPLAIN before it.';
    END;
    FOR found IN
        WITH RECURSIVE node AS (
            SELECT p -> 'Plan' AS n FROM jsonb_array_elements(plan) p
            UNION ALL
            SELECT c FROM node, jsonb_array_elements(coalesce(n -> 'Plans', '[]')) c
        ), touched AS (
            SELECT n, CASE n ->> 'Node Type' WHEN 'ModifyTable' THEN n ->> 'Operation' ELSE 'Select' END AS does,
                to_regclass(format('%I.%I', n ->> 'Schema', n ->> 'Relation Name')) AS relation
            FROM node WHERE n ? 'Relation Name' AND n ? 'Schema'
        ), registered AS (
            SELECT t.n, t.does, t.relation, f.root
            FROM touched t, modak.explain_facts(t.relation) f WHERE f.root IS NOT NULL
        )
        SELECT r.root, r.does, (array_agg(r.n))[1] AS n,
            (
                SELECT array_agg(DISTINCT o.relation::oid) FROM registered o WHERE o.root = r.root AND o.does = 'Select'
            ) AS scanned
        FROM registered r
        WHERE r.does <> 'Select' OR NOT EXISTS (
            SELECT FROM registered o WHERE o.root = r.root AND o.does IN ('Update', 'Delete', 'Merge'))
        GROUP BY r.root, r.does ORDER BY 2, 1
    LOOP
        told := true;
        at := modak.explain_facts(found.root);
        RETURN NEXT CASE found.does
            WHEN 'Insert' THEN modak.explain_insert(at, found.n)
            WHEN 'Merge' THEN format('%s: merges with heap rows only; cannot tell what it means for rows below %s.',
                at.name, coalesce(at.edge, 'the cut-line'))
            ELSE modak.explain_touch(at, found.does <> 'Select', coalesce(at.spill = ANY (found.scanned), false),
                EXISTS (SELECT FROM unnest(found.scanned) s WHERE s <> coalesce(at.spill, 0)))
        END;
    END LOOP;
    IF plan::text ~ 'modak_(upsert|delete)' THEN
        told := true;
        RETURN NEXT 'The statement calls modak functions: each row goes to the heap where a partition for it is attached,'
            ' else to the delta.';
    END IF;
    IF NOT told THEN
        RETURN NEXT 'The plan touches no registered table; cannot tell about functions, or about partitions that were all'
            ' pruned.';
    END IF;
END
$$;

CREATE FUNCTION public.modak_explain(statement text) RETURNS SETOF text
    LANGUAGE sql AS $$ SELECT modak.modak_explain(statement) $$;
CREATE FUNCTION public.modak_upsert(target regclass, row_image jsonb) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.modak_upsert(target, row_image) $$;
CREATE FUNCTION public.modak_upsert_rows(target regclass, row_images jsonb, OUT heap bigint, OUT delta bigint)
    LANGUAGE sql AS $$ SELECT * FROM modak.modak_upsert_rows(target, row_images) $$;
CREATE FUNCTION public.modak_upsert_from(target regclass, source regclass, OUT heap bigint, OUT delta bigint)
    LANGUAGE sql AS $$ SELECT * FROM modak.modak_upsert_from(target, source) $$;
CREATE FUNCTION public.modak_delete_rows(target regclass, keys jsonb, OUT heap bigint, OUT delta bigint)
    LANGUAGE sql AS $$ SELECT * FROM modak.modak_delete_rows(target, keys) $$;
CREATE FUNCTION public.modak_delete_from(target regclass, source regclass, OUT heap bigint, OUT delta bigint)
    LANGUAGE sql AS $$ SELECT * FROM modak.modak_delete_from(target, source) $$;
CREATE FUNCTION public.modak_delete(target regclass, key jsonb, tier_key bigint) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.modak_delete(target, key, tier_key) $$;
CREATE FUNCTION public.modak_delete(target regclass, key jsonb, tier_key date) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.modak_delete(target, key, tier_key) $$;
CREATE FUNCTION public.modak_delete(target regclass, key jsonb, tier_key timestamp) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.modak_delete(target, key, tier_key) $$;
CREATE FUNCTION public.modak_delete(target regclass, key jsonb, tier_key timestamptz) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.modak_delete(target, key, tier_key) $$;
CREATE FUNCTION public.modak_delete(target regclass, key jsonb, tier_key text) RETURNS text
    LANGUAGE sql AS $$ SELECT modak.modak_delete(target, key, tier_key) $$;
