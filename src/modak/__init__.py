"""Modak keeps the cold half of a Postgres database in an open lake."""

__version__ = "0.1.0"
