SELECT c.oid, n.nspname::text, c.relname::text, c.relispartition,
       pg_get_expr(c.relpartbound, c.oid) AS bound,
       coalesce(pg_relation_filenode(c.oid), 0)::int8 AS relfilenode,
       m.pages,
       coalesce(pg_table_size(c.oid), 0) AS bytes,
       -- As the planner guesses: the density of the last ANALYZE, or one made from the widths of the columns.
       (m.pages * CASE WHEN c.relpages > 0 AND c.reltuples >= 0 THEN c.reltuples / c.relpages ELSE m.fitting END)::float8,
       h.inhdetachpending, c.relkind::text
  FROM pg_inherits h
  JOIN pg_class c ON c.oid = h.inhrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL (
     SELECT coalesce(pg_relation_size(c.oid), 0) / current_setting('block_size')::int8 AS pages,
            current_setting('block_size')::float8
                / (28 + coalesce(sum(CASE WHEN a.attlen > 0 THEN a.attlen ELSE 32 END), 0)) AS fitting
       FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 ) m
 WHERE h.inhparent = %s
 ORDER BY c.oid
