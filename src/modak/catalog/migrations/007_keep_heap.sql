-- A table that keeps its heap may be referred to by other tables. Postgres lets go of a referred partition only by
-- detaching it, so the spill partition is detached before it is dropped.

CREATE OR REPLACE FUNCTION modak.drop_spill(watched bigint) RETURNS void
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
    IF parent IS NOT NULL AND EXISTS (SELECT FROM pg_constraint k WHERE k.confrelid = spill AND k.contype = 'f') THEN
        EXECUTE format('ALTER TABLE %s DETACH PARTITION %s', parent::regclass, spill::regclass);
    END IF;
    EXECUTE format('DROP TABLE %s', spill::regclass);
END
$$;
