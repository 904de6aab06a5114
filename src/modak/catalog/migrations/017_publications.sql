-- Where each table stands in the foreign catalog of MODAK_CATALOG_URI. The commit itself is never there.

CREATE TABLE modak.publications (
    table_id bigint NOT NULL REFERENCES modak.tables ON DELETE CASCADE,
    catalog_uri text NOT NULL,
    metadata_location text NOT NULL,
    published_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (table_id, catalog_uri)
);
