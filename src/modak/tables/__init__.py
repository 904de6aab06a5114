"""Postgres tables that live partly or wholly in the lake: registration, tiering, premake, repair."""
