-- What operators do to a fleet and see of it: tables held back, and the workers that are there.

CREATE TABLE modak.pauses (
    table_id bigint PRIMARY KEY REFERENCES modak.tables ON DELETE CASCADE,
    paused_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    paused_by text NOT NULL DEFAULT session_user,
    reason text NOT NULL DEFAULT ''
);
COMMENT ON TABLE modak.pauses IS 'Tables that the leader leaves alone until somebody resumes them';

-- A heartbeat is worth nothing after a crash of the server, so it is not logged.
CREATE UNLOGGED TABLE modak.workers (
    holder text PRIMARY KEY,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    role text NOT NULL CHECK (role IN ('starting', 'standby', 'leading', 'stopping')),
    epoch bigint,
    address text,
    started_at timestamptz NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    doing jsonb NOT NULL DEFAULT '{}'
);

-- Metrics and the list of operations read the journal by time, not by table.
CREATE INDEX op_log_by_start ON modak.op_log (started_at);
