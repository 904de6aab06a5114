-- How the pump of every mirrored table is doing: what it last met, how far it is behind, and the WAL that waits for it.

CREATE TABLE modak.mirror_health (
    table_id bigint PRIMARY KEY REFERENCES modak.tables ON DELETE CASCADE,
    error text,
    failing_since timestamptz,
    lag_bytes bigint NOT NULL DEFAULT 0,
    lag_seconds double precision NOT NULL DEFAULT 0,
    retained_bytes bigint NOT NULL DEFAULT 0,
    slot_active boolean NOT NULL DEFAULT false,
    paused text,
    flushes bigint NOT NULL DEFAULT 0,
    changes bigint NOT NULL DEFAULT 0,
    checked_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN modak.mirror_health.paused IS 'Why the slot was given up to free WAL, until somebody lets the table go on';
GRANT SELECT ON modak.mirror_health TO pg_monitor;
