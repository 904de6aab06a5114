-- Which delta rows a reader at an older lake state still needs. Every move of S begins a new generation of the table's
-- cold half; a pin remembers its generation, a folded row the one that first held it in the lake.

ALTER TABLE modak.cutline ADD COLUMN generation bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN modak.cutline.generation IS 'Counts the moves of S';

ALTER TABLE modak.read_pins ADD COLUMN generation bigint NOT NULL DEFAULT 0;

ALTER TABLE modak.delta
    ADD COLUMN folded_generation bigint,
    ADD CONSTRAINT folded_into_a_generation CHECK ((folded_into IS NULL) = (folded_generation IS NULL));
COMMENT ON COLUMN modak.delta.folded_generation IS 'Readers of this generation and later ones find the row in the lake';
CREATE INDEX delta_folded ON modak.delta (table_id, folded_generation) WHERE folded_generation IS NOT NULL;

CREATE FUNCTION modak.count_generations() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NEW.snapshot_id IS DISTINCT FROM OLD.snapshot_id THEN
        NEW.generation := OLD.generation + 1;
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER count_generations BEFORE UPDATE ON modak.cutline
    FOR EACH ROW EXECUTE FUNCTION modak.count_generations();

-- The outcome of both functions has new columns, which CREATE OR REPLACE cannot give them.
DROP FUNCTION public.modak_read_begin(regclass, interval);
DROP FUNCTION modak.modak_read_begin(regclass, interval);

CREATE FUNCTION modak.modak_read_begin(
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
        (table_id, snapshot_id, t, retention_line, metadata_location, expires_at, holder, generation)
    SELECT c.table_id, c.snapshot_id, c.t, c.retention_line, c.metadata_location, clock_timestamp() + lifetime,
        modak.caller(), c.generation
    FROM modak.cutline c WHERE c.table_id = entry.table_id
    RETURNING p.pin_id, p.t, p.snapshot_id, p.metadata_location, p.retention_line, p.expires_at, p.generation
    INTO pin_id, t, snapshot_id, metadata_location, retention_line, expires_at, generation;
    IF pin_id IS NULL THEN
        RAISE EXCEPTION '% has no lake table yet', target
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Its registration has not finished.';
    END IF;
    delta_query := format('SELECT pk, op, tier_key, version, payload FROM modak.modak_read_delta(%s)', pin_id);
END
$$;

CREATE FUNCTION modak.require_reader(target regclass) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT has_table_privilege(modak.caller(), target, 'SELECT') THEN
        RAISE EXCEPTION 'permission denied for table %', target USING ERRCODE = 'insufficient_privilege';
    END IF;
    -- The delta and the lake know no policies: who may not see every row of the heap sees none of them.
    IF EXISTS (
        SELECT FROM pg_class c JOIN pg_roles r ON r.rolname = modak.caller()
        WHERE c.oid = target AND c.relrowsecurity AND NOT r.rolsuper AND NOT r.rolbypassrls
            AND (c.relforcerowsecurity OR NOT pg_has_role(r.oid, c.relowner, 'USAGE'))
    ) THEN
        RAISE EXCEPTION 'row security of % hides rows from you', target USING ERRCODE = 'insufficient_privilege',
            HINT = 'Only a role that sees every row of the table can read its cold half.';
    END IF;
END
$$;

CREATE FUNCTION modak.modak_read_delta(
    pin bigint, OUT pk text, OUT op smallint, OUT tier_key bigint, OUT version bigint, OUT payload jsonb
) RETURNS SETOF record
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
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
    -- What lies over the lake as it was pinned: rows not yet folded, and rows that were folded after it.
    RETURN QUERY SELECT d.pk, d.op, d.tier_key, d.version, d.payload FROM modak.delta d
    WHERE d.table_id = held.table_id AND d.tier_key < held.t
        AND (held.retention_line IS NULL OR d.tier_key >= held.retention_line)
        AND (d.folded_generation IS NULL OR d.folded_generation > held.generation);
END
$$;

CREATE FUNCTION public.modak_read_begin(
    target regclass, lifetime interval DEFAULT '15 minutes',
    OUT pin_id bigint, OUT t bigint, OUT snapshot_id bigint, OUT metadata_location text, OUT retention_line bigint,
    OUT expires_at timestamptz, OUT generation bigint, OUT delta_query text
)
    LANGUAGE sql AS $$ SELECT * FROM modak.modak_read_begin(target, lifetime) $$;

CREATE OR REPLACE FUNCTION modak.record_change(
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
        xid = pg_current_xact_id(), updated_at = clock_timestamp(), folded_into = NULL, folded_generation = NULL;
END
$$;
