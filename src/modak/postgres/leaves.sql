SELECT c.oid, n.nspname::text, c.relname::text, c.relispartition,
       pg_get_expr(c.relpartbound, c.oid) AS bound,
       coalesce(pg_relation_filenode(c.oid), 0)::int8 AS relfilenode,
       coalesce(pg_relation_size(c.oid), 0) / current_setting('block_size')::int8 AS pages,
       coalesce(pg_table_size(c.oid), 0) AS bytes,
       c.reltuples::float8, h.inhdetachpending, c.relkind::text
  FROM pg_inherits h
  JOIN pg_class c ON c.oid = h.inhrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE h.inhparent = %s
 ORDER BY c.oid
