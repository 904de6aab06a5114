-- The cluster's view of measurement stores: which compacted files there are. Compactors hand over what they made through
-- the leader; a source that was merged away leaves the table in the same transaction as its successor enters it.

CREATE TABLE modak.measurement_files (
    path text PRIMARY KEY,
    sha256 text NOT NULL CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    size_bytes bigint NOT NULL CHECK (size_bytes >= 0),
    database text NOT NULL,
    measurement text NOT NULL,
    partition_time timestamptz NOT NULL,
    tier text NOT NULL,
    created_at timestamptz NOT NULL,
    origin text NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX measurement_files_by_time ON modak.measurement_files (database, measurement, partition_time);

-- Compacted files that were merged on. A hand-over that comes late must not bring such a file back.
CREATE TABLE modak.measurement_tombstones (
    path text PRIMARY KEY,
    gone_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX measurement_tombstones_by_age ON modak.measurement_tombstones (gone_at);
