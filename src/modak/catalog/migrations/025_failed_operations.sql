-- An operation that is given up because of an error ends as failed, after what it had written is gone; abandoned are those
-- that a crash has cut off, or for which there was nothing to do. Both are ends.

DELETE FROM modak.op_steps WHERE from_phase = 'failed';

DROP INDEX modak.op_log_unfinished;
CREATE INDEX op_log_unfinished ON modak.op_log (table_id) WHERE phase NOT IN ('done', 'abandoned', 'failed');

INSERT INTO modak.op_steps VALUES ('abandoned', 'failed');
UPDATE modak.op_log SET phase = 'failed'
WHERE phase = 'abandoned' AND error IS NOT NULL AND error NOT IN ('everything was deferred', 'nothing to copy', 'lake.nothing_changed');
UPDATE modak.op_log SET error = NULL WHERE phase = 'abandoned';
DELETE FROM modak.op_steps WHERE from_phase = 'abandoned';
