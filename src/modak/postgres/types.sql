WITH RECURSIVE needed AS (
    SELECT unnest(%s::oid[]) AS oid
    UNION
    SELECT next.oid
      FROM needed
      JOIN pg_type t ON t.oid = needed.oid
     CROSS JOIN LATERAL (VALUES (t.typbasetype), (t.typelem)) AS next(oid)
     WHERE next.oid <> 0
)
SELECT t.oid, t.typname::text, t.typtype::text, t.typbasetype, t.typtypmod,
       CASE WHEN e.typarray = t.oid THEN t.typelem ELSE 0 END AS element
  FROM needed
  JOIN pg_type t ON t.oid = needed.oid
  LEFT JOIN pg_type e ON e.oid = t.typelem
