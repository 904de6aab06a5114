-- Rows are marked in the order of their ids, so that two writers never wait for each other in a circle.
CREATE OR REPLACE FUNCTION {mark_main}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $mark$
DECLARE now_ms bigint := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO {log} AS l (schema_id, row_id, flushed_at, changed_at, deleted_at)
        SELECT ltbase_schema_id, ltbase_row_id, 0, now_ms, ltbase_deleted_at FROM after_rows ORDER BY 1, 2
        ON CONFLICT (schema_id, row_id, flushed_at)
        DO UPDATE SET changed_at = EXCLUDED.changed_at, deleted_at = EXCLUDED.deleted_at;
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO {log} AS l (schema_id, row_id, flushed_at, changed_at, deleted_at)
        SELECT schema_id, row_id, 0, now_ms, CASE WHEN bool_or(there) THEN max(deleted_at) ELSE now_ms END
        FROM (SELECT ltbase_schema_id, ltbase_row_id, ltbase_deleted_at, true FROM after_rows
              UNION ALL SELECT ltbase_schema_id, ltbase_row_id, NULL, false FROM before_rows)
             AS touched (schema_id, row_id, deleted_at, there)
        GROUP BY 1, 2 ORDER BY 1, 2
        ON CONFLICT (schema_id, row_id, flushed_at)
        DO UPDATE SET changed_at = EXCLUDED.changed_at, deleted_at = EXCLUDED.deleted_at;
    ELSE
        INSERT INTO {log} AS l (schema_id, row_id, flushed_at, changed_at, deleted_at)
        SELECT ltbase_schema_id, ltbase_row_id, 0, now_ms, now_ms FROM before_rows ORDER BY 1, 2
        ON CONFLICT (schema_id, row_id, flushed_at)
        DO UPDATE SET changed_at = EXCLUDED.changed_at, deleted_at = EXCLUDED.deleted_at;
    END IF;
    RETURN NULL;
END $mark$;

CREATE OR REPLACE FUNCTION {mark_eav}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $mark$
DECLARE now_ms bigint := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO {log} AS l (schema_id, row_id, flushed_at, changed_at)
        SELECT DISTINCT schema_id, row_id, 0::bigint, now_ms FROM after_rows ORDER BY 1, 2
        ON CONFLICT (schema_id, row_id, flushed_at) DO UPDATE SET changed_at = EXCLUDED.changed_at;
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO {log} AS l (schema_id, row_id, flushed_at, changed_at)
        SELECT schema_id, row_id, 0::bigint, now_ms
        FROM (SELECT schema_id, row_id FROM after_rows UNION SELECT schema_id, row_id FROM before_rows) AS touched
        ORDER BY 1, 2
        ON CONFLICT (schema_id, row_id, flushed_at) DO UPDATE SET changed_at = EXCLUDED.changed_at;
    ELSE
        INSERT INTO {log} AS l (schema_id, row_id, flushed_at, changed_at)
        SELECT DISTINCT schema_id, row_id, 0::bigint, now_ms FROM before_rows ORDER BY 1, 2
        ON CONFLICT (schema_id, row_id, flushed_at) DO UPDATE SET changed_at = EXCLUDED.changed_at;
    END IF;
    RETURN NULL;
END $mark$;

-- A subscription applies rows without firing triggers of statements; `replica` is what its sessions have in common.
CREATE OR REPLACE FUNCTION {mark_applied}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $mark$
DECLARE now_ms bigint := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
BEGIN
    IF TG_ARGV[0] = 'main' THEN
        INSERT INTO {log} AS l (schema_id, row_id, flushed_at, changed_at, deleted_at)
        SELECT schema_id, row_id, 0, now_ms, CASE WHEN bool_or(there) THEN max(deleted_at) ELSE now_ms END
        FROM (VALUES (OLD.ltbase_schema_id, OLD.ltbase_row_id, NULL::bigint, false),
                     (NEW.ltbase_schema_id, NEW.ltbase_row_id, NEW.ltbase_deleted_at, true))
             AS touched (schema_id, row_id, deleted_at, there)
        WHERE row_id IS NOT NULL GROUP BY 1, 2 ORDER BY 1, 2
        ON CONFLICT (schema_id, row_id, flushed_at)
        DO UPDATE SET changed_at = EXCLUDED.changed_at, deleted_at = EXCLUDED.deleted_at;
    ELSE
        INSERT INTO {log} AS l (schema_id, row_id, flushed_at, changed_at)
        SELECT DISTINCT schema_id, row_id, 0::bigint, now_ms
        FROM (VALUES (OLD.schema_id, OLD.row_id), (NEW.schema_id, NEW.row_id)) AS touched (schema_id, row_id)
        WHERE row_id IS NOT NULL ORDER BY 1, 2
        ON CONFLICT (schema_id, row_id, flushed_at) DO UPDATE SET changed_at = EXCLUDED.changed_at;
    END IF;
    RETURN NULL;
END $mark$;

CREATE OR REPLACE FUNCTION {no_truncate}() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $no$
BEGIN
    RAISE EXCEPTION 'TRUNCATE of % is refused: the entity store could not follow it', TG_TABLE_NAME
        USING HINT = 'Use DELETE.', ERRCODE = 'object_not_in_prerequisite_state';
END $no$;

CREATE OR REPLACE TRIGGER modak_entities_insert AFTER INSERT ON {main}
    REFERENCING NEW TABLE AS after_rows FOR EACH STATEMENT EXECUTE FUNCTION {mark_main}();
CREATE OR REPLACE TRIGGER modak_entities_update AFTER UPDATE ON {main}
    REFERENCING OLD TABLE AS before_rows NEW TABLE AS after_rows FOR EACH STATEMENT EXECUTE FUNCTION {mark_main}();
CREATE OR REPLACE TRIGGER modak_entities_delete AFTER DELETE ON {main}
    REFERENCING OLD TABLE AS before_rows FOR EACH STATEMENT EXECUTE FUNCTION {mark_main}();
CREATE OR REPLACE TRIGGER modak_entities_insert AFTER INSERT ON {eav}
    REFERENCING NEW TABLE AS after_rows FOR EACH STATEMENT EXECUTE FUNCTION {mark_eav}();
CREATE OR REPLACE TRIGGER modak_entities_update AFTER UPDATE ON {eav}
    REFERENCING OLD TABLE AS before_rows NEW TABLE AS after_rows FOR EACH STATEMENT EXECUTE FUNCTION {mark_eav}();
CREATE OR REPLACE TRIGGER modak_entities_delete AFTER DELETE ON {eav}
    REFERENCING OLD TABLE AS before_rows FOR EACH STATEMENT EXECUTE FUNCTION {mark_eav}();
CREATE OR REPLACE TRIGGER modak_entities_applied AFTER INSERT OR UPDATE OR DELETE ON {main} FOR EACH ROW
    WHEN (current_setting('session_replication_role') = 'replica') EXECUTE FUNCTION {mark_applied}('main');
CREATE OR REPLACE TRIGGER modak_entities_applied AFTER INSERT OR UPDATE OR DELETE ON {eav} FOR EACH ROW
    WHEN (current_setting('session_replication_role') = 'replica') EXECUTE FUNCTION {mark_applied}('eav');
CREATE OR REPLACE TRIGGER modak_entities_truncate BEFORE TRUNCATE ON {main}
    FOR EACH STATEMENT EXECUTE FUNCTION {no_truncate}();
CREATE OR REPLACE TRIGGER modak_entities_truncate BEFORE TRUNCATE ON {eav}
    FOR EACH STATEMENT EXECUTE FUNCTION {no_truncate}();
CREATE OR REPLACE TRIGGER modak_entities_truncate BEFORE TRUNCATE ON {log}
    FOR EACH STATEMENT EXECUTE FUNCTION {no_truncate}();
ALTER TABLE {main} ENABLE ALWAYS TRIGGER modak_entities_insert;
ALTER TABLE {main} ENABLE ALWAYS TRIGGER modak_entities_update;
ALTER TABLE {main} ENABLE ALWAYS TRIGGER modak_entities_delete;
ALTER TABLE {main} ENABLE ALWAYS TRIGGER modak_entities_applied;
ALTER TABLE {main} ENABLE ALWAYS TRIGGER modak_entities_truncate;
ALTER TABLE {eav} ENABLE ALWAYS TRIGGER modak_entities_insert;
ALTER TABLE {eav} ENABLE ALWAYS TRIGGER modak_entities_update;
ALTER TABLE {eav} ENABLE ALWAYS TRIGGER modak_entities_delete;
ALTER TABLE {eav} ENABLE ALWAYS TRIGGER modak_entities_applied;
ALTER TABLE {eav} ENABLE ALWAYS TRIGGER modak_entities_truncate;
ALTER TABLE {log} ENABLE ALWAYS TRIGGER modak_entities_truncate;
