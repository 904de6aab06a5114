-- What an update of a single row has to know before it writes: which tier the row is in, and its image where the delta
-- has one. The rest of the way (the lake, the new image) is the caller's.

CREATE FUNCTION modak.modak_read_row(
    pin bigint, key jsonb, OUT tier text, OUT pk text, OUT tier_key bigint, OUT payload jsonb
)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET "TimeZone" = 'UTC'
    SET "DateStyle" = 'ISO, YMD'
    SET "IntervalStyle" = 'iso_8601'
    SET extra_float_digits = 1
    SET bytea_output = 'hex'
AS $$
DECLARE
    held modak.read_pins;
    entry modak.tables;
    here modak.seam;
    typed text;
    image record;
    lying modak.delta;
    hot boolean;
BEGIN
    SELECT * INTO held FROM modak.read_pins p
    WHERE p.pin_id = pin AND p.expires_at > clock_timestamp() AND pg_has_role(modak.caller(), p.holder::name, 'USAGE');
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no pin % of yours', pin
            USING ERRCODE = 'undefined_object', HINT = 'It has lapsed or ended; begin again.';
    END IF;
    SELECT * INTO STRICT entry FROM modak.tables t WHERE t.table_id = held.table_id;
    PERFORM modak.require_writer(entry.relid::regclass, 'SELECT', 'UPDATE');
    PERFORM modak.require_key(modak.correction_of(entry.relid::regclass), ARRAY(SELECT jsonb_object_keys(key)));
    here := modak.seam_of(entry.relid::regclass);
    SELECT string_agg(format('%I %s', a.attname, modak.plain_type(a.atttypid, a.atttypmod)), ', ') INTO typed
    FROM pg_attribute a WHERE a.attrelid = entry.relid AND a.attnum = ANY (entry.pk_attnums || entry.tier_attnum);
    SELECT * INTO image FROM modak.image_sql(entry.relid, entry.pk_attnums, entry.tier_attnum, entry.axis);
    EXECUTE format('SELECT %s, %s FROM jsonb_to_record($1) AS r(%s)', image.pk, image.tier_key, typed)
        INTO pk, tier_key USING key;
    EXECUTE format('SELECT %s FROM (SELECT $1 AS k) x', modak.hot_sql(here, 'x.k')) INTO hot USING tier_key;
    IF hot THEN
        tier := 'heap';
        RETURN;
    END IF;
    PERFORM modak.refuse_unless_cold(here, ARRAY[tier_key]);
    -- Folded into the pinned lake state or before it: the lake has it.
    SELECT * INTO lying FROM modak.delta d
    WHERE d.table_id = held.table_id AND d.pk = modak_read_row.pk AND d.tier_key = modak_read_row.tier_key
        AND (d.folded_generation IS NULL OR d.folded_generation > held.generation);
    tier := CASE lying.op WHEN 1 THEN 'delta' WHEN 2 THEN 'gone' ELSE 'lake' END;
    payload := lying.payload;
END
$$;
