-- Forced maintenance passes: what became of a request, and when a table was last looked after.

ALTER TABLE modak.maintenance_requests
    ADD COLUMN claimed_epoch bigint,
    ADD COLUMN finished_at timestamptz,
    ADD COLUMN progress jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN outcome jsonb,
    ADD COLUMN error text,
    ADD CONSTRAINT finished_after_its_claim CHECK (finished_at IS NULL OR claimed_at IS NOT NULL);
COMMENT ON COLUMN modak.maintenance_requests.progress IS 'What the pass is doing now: pass, done, total';
CREATE INDEX maintenance_requests_running ON modak.maintenance_requests (table_id)
    WHERE claimed_at IS NOT NULL AND finished_at IS NULL;

ALTER TABLE modak.lake_stats ADD COLUMN maintained_at timestamptz;
COMMENT ON COLUMN modak.lake_stats.maintained_at IS 'When the last maintenance pass ended, whether or not it had to do anything';
