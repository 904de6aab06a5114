-- What we make below a table belongs to the table's owner, because ALTER TABLE asks for the ownership of every partition.

CREATE FUNCTION modak.give_to_owner(made regclass, root regclass) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('ALTER TABLE %s OWNER TO %I', made,
        (SELECT pg_get_userbyid(c.relowner) FROM pg_class c WHERE c.oid = root));
EXCEPTION WHEN insufficient_privilege THEN
    -- An owner who may not create in the schema (any more) cannot be given anything there: the partition stays ours.
    RETURN;
END
$$;
REVOKE EXECUTE ON FUNCTION modak.give_to_owner(regclass, regclass) FROM PUBLIC;

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
    EXECUTE format('CREATE TRIGGER "~modak_spill" BEFORE INSERT ON %s FOR EACH ROW'
        ' EXECUTE FUNCTION modak.divert(%L, %L, %L, %L, %L)',
        spill, watched, keys, tier, floor, ceiling);
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER "~modak_spill"', spill);
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
