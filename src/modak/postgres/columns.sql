WITH measured AS (
    -- Autovacuum analyses leaves, never their parent; the largest leaf speaks for it then.
    (SELECT n.nspname, c.relname, 1 AS place
       FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
      WHERE c.oid = %(oid)s)
    UNION ALL
    (SELECT n.nspname, c.relname, 2
       FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
      WHERE h.inhparent = %(oid)s
      ORDER BY c.reltuples DESC LIMIT 1)
), missing AS (
    -- A partitioned table holds no rows, so the value that old rows show is recorded at its leaves.
    SELECT a.attname, min(shown.value) AS value
      FROM pg_attribute a
      LEFT JOIN pg_inherits h ON h.inhrelid = a.attrelid
     CROSS JOIN LATERAL (SELECT (a.attmissingval::text::text[])[1] AS value) shown
     WHERE (a.attrelid = %(oid)s OR h.inhparent = %(oid)s) AND a.atthasmissing AND NOT a.attisdropped AND a.attnum > 0
     GROUP BY a.attname
    HAVING count(DISTINCT shown.value) = 1
)
SELECT a.attname::text, a.attnum, a.atttypid, a.atttypmod, a.attnotnull,
       pg_get_expr(d.adbin, d.adrelid) AS default_sql, d.adbin::text AS default_tree,
       m.value AS missing_value, a.attgenerated <> '' AS generated,
       s.n_distinct, coalesce(l.collisdeterministic, true) AS deterministic,
       format_type(a.atttypid, a.atttypmod) AS type_sql
  FROM pg_attribute a
  LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
  LEFT JOIN pg_collation l ON l.oid = a.attcollation
  LEFT JOIN missing m ON m.attname = a.attname
  LEFT JOIN LATERAL (SELECT t.n_distinct::float8
                       FROM measured b
                       JOIN pg_stats t ON t.schemaname = b.nspname AND t.tablename = b.relname AND t.attname = a.attname
                      ORDER BY b.place, t.inherited DESC LIMIT 1) s ON true
 WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum
