"""Iceberg as the lake's format: the schema map, data files and vectors, reading metadata, and preparing commits."""
