-- Tables that are no longer registered and may still stand in a foreign catalog: they are taken out there, without their
-- files, as soon as it can be reached.

CREATE TABLE modak.withdrawals (
    catalog_uri text NOT NULL,
    lake_namespace text NOT NULL,
    lake_name text NOT NULL,
    location text NOT NULL,
    asked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (catalog_uri, lake_namespace, lake_name)
);
