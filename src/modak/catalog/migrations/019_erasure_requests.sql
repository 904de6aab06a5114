-- Erasures that a running leader is asked for: the condition waits here until it has been executed, and is then forgotten.

ALTER TABLE modak.erasures
    ADD COLUMN condition text,
    ADD COLUMN claimed_epoch bigint,
    ADD COLUMN answered_at timestamptz,
    ADD COLUMN outcome jsonb,
    ADD COLUMN error text,
    ADD CONSTRAINT forgotten_when_answered CHECK (answered_at IS NULL OR condition IS NULL);
COMMENT ON COLUMN modak.erasures.condition IS 'Which rows, for as long as nobody has executed it: it may name the person';
CREATE INDEX erasures_asked ON modak.erasures (erasure_id) WHERE condition IS NOT NULL;
