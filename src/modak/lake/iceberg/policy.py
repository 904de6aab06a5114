"""The maintenance policy that the Iceberg plugin understands: every key, its default and what it means."""

from __future__ import annotations

from modak.lake.policy import PolicyKey

_CENTURY = 876_000
"""In hours. Much more than that before now is no year that a clock knows."""

_ALL = (
    PolicyKey("maintenance_enabled", "flag", None, "the whole maintenance pass", setting="enabled"),
    PolicyKey("rewrite_enabled", "flag", None, "small-file bin-pack", setting="rewrite_enabled"),
    PolicyKey(
        "rewrite_target_bytes",
        "number",
        None,
        "data files smaller than this are bin-pack candidates",
        least=1024,
        most=1 << 40,
        setting="rewrite_target_bytes",
    ),
    PolicyKey(
        "rewrite_min_input_files",
        "number",
        None,
        "small files that must accumulate before a rewrite runs",
        least=2,
        setting="rewrite_min_input_files",
    ),
    PolicyKey(
        "rewrite_max_input_files",
        "number",
        20_000,
        "files rewritten per commit; what is beyond follows in further commits",
        least=2,
    ),
    PolicyKey("rewrite_sort_columns", "columns", "", "columns by which rewritten files are sorted"),
    PolicyKey("rewrite_zorder_columns", "columns", "", "columns by which rewritten files are z-ordered"),
    PolicyKey("delete_compaction_enabled", "flag", None, "delete-debt compaction", setting="delete_compaction_enabled"),
    PolicyKey(
        "delete_compaction_min_deletes",
        "number",
        1,
        "delete files a data file must carry before it is rewritten",
        least=1,
    ),
    PolicyKey("manifest_rewrite_enabled", "flag", None, "manifest rewrite", setting="manifest_rewrite_enabled"),
    PolicyKey(
        "manifest_rewrite_min_manifests", "number", 100, "manifest count that triggers a manifest rewrite", least=2
    ),
    PolicyKey("snapshot_expiry_enabled", "flag", None, "snapshot expiry", setting="snapshot_expiry_enabled"),
    PolicyKey(
        "snapshot_retention_hours",
        "number",
        None,
        "snapshots older than this are expirable",
        most=_CENTURY,
        setting="snapshot_retention_hours",
    ),
    PolicyKey(
        "snapshot_min_retained",
        "number",
        None,
        "snapshots always kept, regardless of age",
        least=1,
        setting="snapshot_min_retained",
    ),
    PolicyKey("snapshot_max_count", "number", 1_000, "snapshots listed at most; the oldest expire first", least=1),
    PolicyKey(
        "orphan_sweep_enabled", "flag", None, "listing-based sweep of orphan files", setting="orphan_sweep_enabled"
    ),
    PolicyKey(
        "orphan_grace_hours",
        "number",
        72,
        "age before an unreferenced or failed-load file may be deleted",
        least=1,
        most=_CENTURY,
    ),
)

KEYS = {key.name: key for key in _ALL}
