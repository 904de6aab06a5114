-- Enums are no keys any more: a label can be renamed, while the lake and the delta know rows by its text. Tables that were
-- registered with such a key remember their labels, and a renamed one stops every commit until it has its name again.

CREATE TABLE modak.key_labels (
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    label_oid oid NOT NULL,
    label text NOT NULL,
    PRIMARY KEY (table_id, label_oid)
);
COMMENT ON TABLE modak.key_labels IS 'What the lake calls the labels of keys that are enums';

CREATE FUNCTION modak.key_labels_now(of_table bigint)
    RETURNS TABLE (column_name text, type_name text, label_oid oid, label text)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT a.attname::text, e.enumtypid::regtype::text, e.oid, e.enumlabel::text
    FROM modak.tables t
    JOIN pg_attribute a ON a.attrelid = t.relid AND a.attnum = ANY (t.pk_attnums) AND NOT a.attisdropped
    JOIN pg_enum e ON e.enumtypid = modak.base_type(a.atttypid)
    WHERE t.table_id = of_table
$$;
REVOKE EXECUTE ON FUNCTION modak.key_labels_now(bigint) FROM PUBLIC;

INSERT INTO modak.key_labels SELECT DISTINCT t.table_id, k.label_oid, k.label FROM modak.tables t, modak.key_labels_now(t.table_id) k;
