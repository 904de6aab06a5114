-- A reader's promise from the worker: what this pin names stays readable until the pin ends or expires. A pin protects
-- before its transaction commits by the shared advisory lock, afterwards by its row.

CREATE FUNCTION modak.caller() RETURNS name
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    -- The role that called a SECURITY DEFINER function, SET ROLE included.
    SELECT CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role')::name END
$$;

CREATE FUNCTION modak.pin_lock_key(of_table bigint) RETURNS bigint
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$ SELECT 5570746397223387136 + of_table $$;

CREATE FUNCTION modak.registered(target regclass) RETURNS modak.tables
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry modak.tables;
BEGIN
    SELECT * INTO entry FROM modak.tables t WHERE t.relid = target;
    IF NOT FOUND THEN
        RAISE EXCEPTION '% is not registered with modak', target
            USING ERRCODE = 'undefined_object', HINT = 'Register it with: modak-worker register --table …';
    END IF;
    RETURN entry;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.registered(regclass) FROM PUBLIC;

CREATE FUNCTION modak.modak_read_begin(
    target regclass, lifetime interval DEFAULT '15 minutes',
    OUT pin_id bigint, OUT t bigint, OUT snapshot_id bigint, OUT metadata_location text, OUT retention_line bigint,
    OUT expires_at timestamptz
)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry CONSTANT modak.tables := modak.registered(target);
BEGIN
    IF NOT has_table_privilege(modak.caller(), target, 'SELECT') THEN
        RAISE EXCEPTION 'permission denied for table %', target USING ERRCODE = 'insufficient_privilege';
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- An older snapshot could pin a lake state that is already being deleted.
        RAISE EXCEPTION 'a read pin must be taken before a % transaction begins', current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction', HINT = 'Call modak_read_begin in a transaction of its own, then begin.';
    END IF;
    IF lifetime <= interval '0' OR lifetime > interval '7 days' THEN
        RAISE EXCEPTION 'a pin lives up to seven days, not %', lifetime USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pg_advisory_xact_lock_shared(modak.pin_lock_key(entry.table_id));
    INSERT INTO modak.read_pins AS p (table_id, snapshot_id, t, retention_line, metadata_location, expires_at, holder)
    SELECT c.table_id, c.snapshot_id, c.t, c.retention_line, c.metadata_location, clock_timestamp() + lifetime, modak.caller()
    FROM modak.cutline c WHERE c.table_id = entry.table_id
    RETURNING p.pin_id, p.t, p.snapshot_id, p.metadata_location, p.retention_line, p.expires_at
    INTO pin_id, t, snapshot_id, metadata_location, retention_line, expires_at;
    IF pin_id IS NULL THEN
        RAISE EXCEPTION '% has no lake table yet', target
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Its registration has not finished.';
    END IF;
END
$$;

CREATE FUNCTION modak.modak_read_renew(pin bigint, lifetime interval DEFAULT '15 minutes') RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- A lapsed pin is not revived: what it protected may be gone.
    UPDATE modak.read_pins p SET expires_at = greatest(p.expires_at, clock_timestamp() + least(lifetime, interval '7 days'))
    WHERE p.pin_id = pin AND p.expires_at > clock_timestamp() AND pg_has_role(modak.caller(), p.holder::name, 'USAGE');
    RETURN FOUND;
END
$$;

CREATE FUNCTION modak.modak_read_end(pin bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    held boolean;
BEGIN
    -- True only when the pin held until now: anything else means that the read may have missed rows.
    DELETE FROM modak.read_pins p
    WHERE p.pin_id = pin AND pg_has_role(modak.caller(), p.holder::name, 'USAGE')
    RETURNING p.expires_at > clock_timestamp() INTO held;
    RETURN coalesce(held, false);
END
$$;

CREATE FUNCTION modak.modak_version() RETURNS text
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT m.worker FROM modak.schema_meta m ORDER BY m.version DESC LIMIT 1 $$;

CREATE FUNCTION public.modak_read_begin(
    target regclass, lifetime interval DEFAULT '15 minutes',
    OUT pin_id bigint, OUT t bigint, OUT snapshot_id bigint, OUT metadata_location text, OUT retention_line bigint,
    OUT expires_at timestamptz
)
    LANGUAGE sql AS $$ SELECT * FROM modak.modak_read_begin(target, lifetime) $$;

CREATE FUNCTION public.modak_read_renew(pin bigint, lifetime interval DEFAULT '15 minutes') RETURNS boolean
    LANGUAGE sql AS $$ SELECT modak.modak_read_renew(pin, lifetime) $$;

CREATE FUNCTION public.modak_read_end(pin bigint) RETURNS boolean
    LANGUAGE sql AS $$ SELECT modak.modak_read_end(pin) $$;

CREATE FUNCTION public.modak_version() RETURNS text
    LANGUAGE sql STABLE AS $$ SELECT modak.modak_version() $$;
