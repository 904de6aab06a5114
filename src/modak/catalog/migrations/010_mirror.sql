-- Mirrored tables: the end of an interrupted first copy, leaves whose rows came or went without a word in the WAL, heap
-- retention, and the guards against TRUNCATE.

ALTER TABLE modak.cutline ADD COLUMN heal_until pg_lsn;
COMMENT ON COLUMN modak.cutline.heal_until IS
    'Up to here rows were read later than F: a change before it may already be in the lake, so inserts count as upserts';

ALTER TABLE modak.partitions
    ADD COLUMN sealed_lsn pg_lsn, ADD COLUMN dropped_lsn pg_lsn, ADD COLUMN attachment text NOT NULL DEFAULT '';
COMMENT ON COLUMN modak.partitions.attachment IS
    'Which ATTACH has put the leaf below its table: rows that were written while it was apart are in no change stream';
COMMENT ON COLUMN modak.partitions.sealed_lsn IS
    'Mirrored with heap retention: later writes to the leaf are in the delta; when F is here, all earlier ones are in the lake';
COMMENT ON COLUMN modak.partitions.dropped_lsn IS 'The leaf wrote no WAL from here on; only when F is here its delta folds';

CREATE FUNCTION modak.note_drop() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Whoever takes this step holds the leaf's lock, or the leaf is gone: it writes no WAL any more.
    NEW.dropped_lsn := pg_current_wal_insert_lsn();
    RETURN NEW;
END
$$;

CREATE TRIGGER note_drop BEFORE UPDATE ON modak.partitions
    FOR EACH ROW WHEN (NEW.state = 'dropped' AND OLD.state <> 'dropped') EXECUTE FUNCTION modak.note_drop();

COMMENT ON COLUMN modak.copy_progress.first_pk IS 'Rows after this key belong to the chunk; NULL: from the beginning';
COMMENT ON COLUMN modak.copy_progress.last_pk IS 'Rows up to and with this key belong to the chunk; NULL: to the end';
COMMENT ON COLUMN modak.copy_progress.rows IS
    'Rows that one task has copied with this chunk and the following ones, noted at the first of them';

-- Stretches of a mirrored table in which heap and lake have to be compared, once F has passed the place in the WAL.
CREATE TABLE modak.mirror_diffs (
    diff_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    lower_bound bigint,
    upper_bound bigint,
    after_lsn pg_lsn NOT NULL,
    reason text NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX mirror_diffs_of_table ON modak.mirror_diffs (table_id);

-- What a relation's replica identity was before we set it, so that unregistering can set it back.
CREATE TABLE modak.mirror_identities (
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    relid oid NOT NULL,
    identity "char" NOT NULL,
    index_name text,
    PRIMARY KEY (table_id, relid)
);

CREATE FUNCTION modak.relations_below(root oid) RETURNS TABLE (relid oid)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    -- The table itself and its partitions of every level; the spill never holds a row.
    WITH RECURSIVE tree AS (
        SELECT root AS oid
        UNION ALL SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
    )
    SELECT tree.oid FROM tree JOIN pg_class c ON c.oid = tree.oid
    WHERE c.relkind IN ('r', 'p') AND NOT EXISTS (SELECT FROM modak.spills s WHERE s.spill_oid = tree.oid)
$$;

CREATE FUNCTION modak.note_identities(watched bigint) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO modak.mirror_identities (table_id, relid, identity, index_name)
    SELECT watched, c.oid, c.relreplident, (
        SELECT i.indexrelid::regclass::text FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident)
    FROM modak.tables t, LATERAL modak.relations_below(t.relid) b JOIN pg_class c ON c.oid = b.relid
    WHERE t.table_id = watched
    ON CONFLICT DO NOTHING
$$;

CREATE FUNCTION modak.guard_truncate() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry modak.tables;
BEGIN
    SELECT * INTO entry FROM modak.tables t WHERE t.table_id = TG_ARGV[0]::bigint;
    IF NOT FOUND OR entry.mode <> 'mirrored' THEN
        RETURN NULL;
    END IF;
    IF entry.heap_retention IS NOT NULL THEN
        RAISE EXCEPTION 'cannot truncate %.%: most of its rows have left the heap for the lake', TG_TABLE_SCHEMA, TG_TABLE_NAME
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Use DELETE, or modak_delete for rows of the lake.';
    ELSIF TG_RELID = entry.relid THEN
        -- Says to the guards of the leaves, which come next, that they go together with their table.
        PERFORM set_config('modak.truncating', CASE TG_WHEN WHEN 'BEFORE' THEN entry.relid::text ELSE '' END, true);
    ELSIF current_setting('modak.truncating', true) IS DISTINCT FROM entry.relid::text THEN
        RAISE EXCEPTION 'cannot truncate %.% alone: Postgres does not tell the mirror of %.% about it',
            TG_TABLE_SCHEMA, TG_TABLE_NAME, entry.schema_name, entry.table_name
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Use DELETE, or truncate the whole table.';
    END IF;
    RETURN NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.guard_truncate() FROM PUBLIC;

CREATE FUNCTION modak.unguarded(watched bigint) RETURNS TABLE (schema_name text, table_name text)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT n.nspname::text, c.relname::text
    FROM modak.tables t, LATERAL modak.relations_below(t.relid) b
    JOIN pg_class c ON c.oid = b.relid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE t.table_id = watched AND t.mode = 'mirrored'
        -- A table without partitions is followed through its truncations.
        AND (t.heap_retention IS NOT NULL OR EXISTS (SELECT FROM pg_partitioned_table p WHERE p.partrelid = t.relid))
        AND NOT EXISTS (
            SELECT FROM pg_trigger g WHERE g.tgrelid = c.oid AND g.tgname = '!modak_truncate' AND g.tgenabled = 'A'
                AND g.tgfoid = 'modak.guard_truncate'::regproc
        )
    ORDER BY 1, 2
$$;

CREATE FUNCTION modak.install_truncate_guard(watched bigint, rel oid) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    root oid;
BEGIN
    SELECT t.relid INTO STRICT root FROM modak.tables t WHERE t.table_id = watched;
    EXECUTE format('DROP TRIGGER IF EXISTS "!modak_truncate" ON %s', rel::regclass);
    EXECUTE format('CREATE TRIGGER "!modak_truncate" BEFORE TRUNCATE ON %s FOR EACH STATEMENT'
        ' EXECUTE FUNCTION modak.guard_truncate(%L)', rel::regclass, watched);
    EXECUTE format('ALTER TABLE ONLY %s ENABLE ALWAYS TRIGGER "!modak_truncate"', rel::regclass);
    IF rel = root THEN
        EXECUTE format('DROP TRIGGER IF EXISTS "~modak_truncated" ON %s', rel::regclass);
        EXECUTE format('CREATE TRIGGER "~modak_truncated" AFTER TRUNCATE ON %s FOR EACH STATEMENT'
            ' EXECUTE FUNCTION modak.guard_truncate(%L)', rel::regclass, watched);
        EXECUTE format('ALTER TABLE ONLY %s ENABLE ALWAYS TRIGGER "~modak_truncated"', rel::regclass);
    END IF;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.install_truncate_guard(bigint, oid) FROM PUBLIC;

CREATE FUNCTION modak.remove_truncate_guards(watched bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    found record;
BEGIN
    FOR found IN
        SELECT g.tgrelid, g.tgname FROM pg_trigger g
        WHERE g.tgfoid = 'modak.guard_truncate'::regproc
            AND split_part(encode(g.tgargs, 'escape'), '\000', 1) = watched::text
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', found.tgname, found.tgrelid::regclass);
    END LOOP;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.remove_truncate_guards(bigint) FROM PUBLIC;

-- A mirrored table with heap retention reads and is corrected as a tiered one: it has a cut-line. Without one, the heap
-- has every row.
CREATE OR REPLACE FUNCTION modak.seam_of(target regclass) RETURNS modak.seam
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
    top CONSTANT oid := coalesce(pg_partition_root(target), target);
    here modak.seam;
BEGIN
    SELECT entry.table_id, format('%s.%s', entry.schema_name, entry.table_name),
        CASE WHEN entry.heap_retention IS NOT NULL THEN 'tiered' ELSE entry.mode END, entry.axis,
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
