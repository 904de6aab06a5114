"""The lake: what a table in it is and how it changes, as values; `iceberg` is the plugin that knows the format."""
