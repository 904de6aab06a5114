SELECT c.oid, pg_get_userbyid(c.relowner) AS owner, c.relkind::text, c.relpersistence::text,
       p.partstrat::text,
       (SELECT coalesce(array_agg(a.attname::text ORDER BY k.place), '{}')
          FROM unnest(p.partattrs::int2[]) WITH ORDINALITY AS k(attnum, place)
          LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum) AS partition_columns,
       (SELECT coalesce(array_agg(a.attname::text ORDER BY k.place), '{}')
          FROM pg_index i
         CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
          JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
         WHERE i.indrelid = c.oid AND i.indisprimary AND k.place <= i.indnkeyatts) AS primary_key,
       (SELECT coalesce(array_agg(format('%%I.%%I: %%I', fn.nspname, fc.relname, f.conname) ORDER BY 1), '{}')
          FROM pg_constraint f
          JOIN pg_class fc ON fc.oid = f.conrelid
          JOIN pg_namespace fn ON fn.oid = fc.relnamespace
         WHERE f.contype = 'f' AND f.confrelid = c.oid AND f.conparentid = 0) AS inbound_foreign_keys,
       array_remove(ARRAY[
           CASE WHEN pg_has_role(current_user, c.relowner, 'USAGE') THEN 'owner' END,
           CASE WHEN NOT EXISTS (SELECT FROM pg_inherits h JOIN pg_class lc ON lc.oid = h.inhrelid
                                  WHERE h.inhparent = c.oid AND NOT pg_has_role(current_user, lc.relowner, 'USAGE'))
                THEN 'owner_of_partitions' END,
           CASE WHEN has_table_privilege(c.oid, 'SELECT') THEN 'select' END,
           CASE WHEN NOT EXISTS (SELECT FROM pg_inherits h
                                  WHERE h.inhparent = c.oid AND NOT has_table_privilege(h.inhrelid, 'SELECT'))
                THEN 'select_partitions' END,
           CASE WHEN has_table_privilege(c.oid, 'INSERT') THEN 'insert' END,
           CASE WHEN has_table_privilege(c.oid, 'UPDATE') THEN 'update' END,
           CASE WHEN has_table_privilege(c.oid, 'DELETE') THEN 'delete' END,
           CASE WHEN has_table_privilege(c.oid, 'TRUNCATE') THEN 'truncate' END,
           CASE WHEN has_table_privilege(c.oid, 'TRIGGER') THEN 'trigger' END,
           CASE WHEN has_schema_privilege(c.relnamespace, 'USAGE') THEN 'usage_of_schema' END,
           CASE WHEN has_schema_privilege(c.relnamespace, 'CREATE') THEN 'create_in_schema' END,
           CASE WHEN has_database_privilege(current_database(), 'CREATE') THEN 'create_in_database' END,
           CASE WHEN me.rolsuper THEN 'superuser' END,
           CASE WHEN me.rolreplication OR me.rolsuper THEN 'replication' END], NULL) AS privileges,
       c.relrowsecurity AND (c.relforcerowsecurity OR NOT pg_has_role(current_user, c.relowner, 'USAGE'))
           AND NOT me.rolbypassrls AND NOT me.rolsuper AS row_security,
       coalesce(pg_relation_filenode(c.oid), 0)::int8 AS relfilenode,
       coalesce(pg_relation_size(c.oid), 0) / current_setting('block_size')::int8 AS pages,
       coalesce(pg_table_size(c.oid), 0) AS bytes,
       c.reltuples::float8 AS rows_estimate,
       (SELECT reset_val FROM pg_settings WHERE name = 'TimeZone') AS time_zone
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_roles me ON me.rolname = current_user
  LEFT JOIN pg_partitioned_table p ON p.partrelid = c.oid
 WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p', 'f', 'v', 'm')
