"""Postgres: connections, what a table looks like, rows as Arrow, locks, and the embedded server."""
