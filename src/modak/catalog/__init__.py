"""The state of every registered table, kept in schema `modak` of the user's own Postgres."""
