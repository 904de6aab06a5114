"""HTTP: health, metrics, the API, the read-only Iceberg catalog. The console and Stream Load are put on top of it."""
