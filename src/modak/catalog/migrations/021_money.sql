-- The text of money follows lc_monetary; as with dates and floats, the writer's session has no say in it.

ALTER FUNCTION modak.capture() SET lc_monetary = 'C';
ALTER FUNCTION modak.divert() SET lc_monetary = 'C';
ALTER FUNCTION modak.take_in(regclass, tid[]) SET lc_monetary = 'C';
ALTER FUNCTION modak.bury(regclass, jsonb) SET lc_monetary = 'C';
ALTER FUNCTION modak.modak_read_row(bigint, jsonb) SET lc_monetary = 'C';
