"""Settings of the fleet, then the table's own: what is in force is never a guess, and nonsense is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from modak import config
from modak.catalog import migrate
from modak.core import faults
from modak.core.errors import Conflict, UsageError
from modak.core.faults import Fault, InjectedFault
from modak.core.names import TableName
from modak.lake.policy import keys_of
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime.opening import open_site
from modak.tables.maintenance.policy import edit, of, parse, resolve
from modak.tables.site import Site
from tests.cli.conftest import modak  # noqa: F401
from tests.tables.conftest import settings_for

NAME = TableName("public", "events")
SEED = {
    "maintenance_enabled": True,
    "rewrite_enabled": True,
    "rewrite_target_bytes": 128 << 20,
    "rewrite_min_input_files": 8,
    "delete_compaction_enabled": True,
    "delete_compaction_min_deletes": 1,
    "manifest_rewrite_enabled": True,
    "manifest_rewrite_min_manifests": 100,
    "snapshot_expiry_enabled": True,
    "snapshot_retention_hours": 24,
    "snapshot_min_retained": 5,
    "snapshot_max_count": 1000,
    "orphan_sweep_enabled": False,
    "orphan_grace_hours": 72,
}
OURS = {"rewrite_max_input_files": 20_000, "rewrite_sort_columns": "", "rewrite_zorder_columns": ""}


@pytest.fixture
def site(fresh_database: Dsn, warehouse: str, tmp_path: Path) -> Iterator[Site]:
    """A site with a table that is registered in the catalog only: policies need no lake."""
    with connect(fresh_database) as conn:
        migrate.migrate(conn)
    with open_site(settings_for(fresh_database, warehouse, tmp_path)) as opened:
        with opened.connect(autocommit=True) as conn:
            conn.execute("CREATE TABLE public.events (id bigint, ts bigint, PRIMARY KEY (id, ts))")
            conn.execute(
                "INSERT INTO modak.tables (schema_name, table_name, relid, mode, pk_columns, pk_attnums, tier_key,"
                " tier_attnum, axis, profile_id, lake_namespace, lake_name, location) SELECT 'public', 'events',"
                " 'public.events'::regclass, 'tiered', '{id}', '{1}', 'ts', 2, 'integer', profile_id, 'modak.public',"
                " 'events', 'file:///nowhere' FROM modak.storage_profiles WHERE is_default"
            )
            conn.execute(
                "INSERT INTO modak.cutline (table_id, t, metadata_location) SELECT table_id, 0, 'x' FROM modak.tables"
            )
        yield opened


def stored(site: Site) -> Any:
    with site.connect(autocommit=True) as conn:
        row = conn.execute("SELECT maintenance_policy FROM modak.tables").fetchone()
    assert row is not None
    return row[0]


def test_every_key_of_the_reference_is_there_with_its_default() -> None:
    assert resolve(config.load({}), {}).plain() == SEED | OURS


def test_the_environment_gives_the_defaults_and_the_table_goes_over_them() -> None:
    settings = config.load({"MODAK_SNAPSHOT_RETENTION_HOURS": "48", "MODAK_REWRITE_ENABLED": "false"})
    found = resolve(settings, {"snapshot_retention_hours": 6})
    assert (found["snapshot_retention_hours"], found.settings["snapshot_retention_hours"].source) == (6, "table")
    assert (found["rewrite_enabled"], found.settings["rewrite_enabled"].source) == (False, "default")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("snapshot_retention_hour", "6", "snapshot_retention_hours"),
        ("snapshot_retention_hours", "six", "whole number"),
        ("snapshot_retention_hours", "-1", "whole number"),
        ("snapshot_min_retained", "0", "at least 1"),
        ("rewrite_min_input_files", "1", "at least 2"),
        ("rewrite_target_bytes", "0", "at least 1024"),
        ("rewrite_enabled", "yes", "true or false"),
        ("orphan_grace_hours", "0", "at least 1"),
        ("orphan_grace_hours", "20000000", "at most 876000"),
        ("snapshot_retention_hours", "876001", "at most 876000"),
        ("snapshot_max_count", "99999999999", "at most 1000000000"),
        ("rewrite_target_bytes", "99999999999999", "at most"),
        ("colour", "red", "colour"),
    ],
)
def test_unknown_keys_and_senseless_values_are_refused(key: str, value: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse({key: value})
    assert says in f"{refused.value.message} {refused.value.hint}"


def test_several_changes_happen_at_once_or_not_at_all(site: Site) -> None:
    edit(site, NAME, parse({"snapshot_retention_hours": "6", "rewrite_enabled": "false"}), (), reset=False)
    assert stored(site) == {"snapshot_retention_hours": 6, "rewrite_enabled": False}
    with pytest.raises(UsageError, match="snapshot_max_count"):
        edit(site, NAME, parse({"orphan_grace_hours": "5", "snapshot_max_count": "2"}), (), reset=False)
    with pytest.raises(UsageError, match="no column 'colour'"):
        edit(site, NAME, parse({"rewrite_sort_columns": "id,colour"}), (), reset=False)
    with pytest.raises(UsageError, match="either sorted"):
        edit(site, NAME, parse({"rewrite_sort_columns": "id", "rewrite_zorder_columns": "ts"}), (), reset=False)
    assert stored(site) == {"snapshot_retention_hours": 6, "rewrite_enabled": False}
    edit(site, NAME, parse({"snapshot_min_retained": "2"}), ["rewrite_enabled"], reset=False)
    assert stored(site) == {"snapshot_retention_hours": 6, "snapshot_min_retained": 2}
    assert of(site, site.reader.state(NAME).table)["rewrite_enabled"] is True
    edit(site, NAME, {}, (), reset=True)
    assert stored(site) == {}


def with_more_retained(site: Site) -> Site:
    """The same site where the fleet keeps more snapshots than a table may list."""
    fleet = config.load({"MODAK_SNAPSHOT_MIN_RETAINED": "2000"})
    return replace(site, settings=replace(site.settings, maintenance=fleet.maintenance))


def test_defaults_that_do_not_go_together_hold_up_no_other_change(site: Site) -> None:
    fleet = with_more_retained(site)
    edit(fleet, NAME, parse({"orphan_grace_hours": "5"}), (), reset=False)
    edit(fleet, NAME, parse({"snapshot_max_count": "3000"}), (), reset=False)
    edit(fleet, NAME, {}, ["snapshot_max_count"], reset=False)
    assert stored(site) == {"orphan_grace_hours": 5}
    with pytest.raises(UsageError, match=r"snapshot_max_count \(1500\)") as refused:
        edit(fleet, NAME, parse({"snapshot_max_count": "1500"}), (), reset=False)
    assert "snapshot_min_retained is not the table's own" in refused.value.hint
    edit(fleet, NAME, parse({"snapshot_max_count": "1500", "snapshot_min_retained": "10"}), (), reset=False)
    with pytest.raises(UsageError, match=r"snapshot_min_retained \(2000\)"):
        edit(fleet, NAME, {}, ["snapshot_min_retained"], reset=False)
    edit(fleet, NAME, {}, (), reset=True)
    assert stored(site) == {}


def test_a_column_that_has_gone_holds_up_no_other_change(site: Site) -> None:
    with site.connect(autocommit=True) as conn:
        conn.execute("ALTER TABLE public.events ADD COLUMN passing int")
        edit(site, NAME, parse({"rewrite_sort_columns": "passing"}), (), reset=False)
        conn.execute("ALTER TABLE public.events DROP COLUMN passing")
    edit(site, NAME, parse({"orphan_grace_hours": "5"}), (), reset=False)
    assert stored(site) == {"rewrite_sort_columns": "passing", "orphan_grace_hours": 5}


def test_arrays_are_sorted_by_but_not_z_ordered(site: Site) -> None:
    with site.connect(autocommit=True) as conn:
        conn.execute("ALTER TABLE public.events ADD COLUMN tags text[]")
    edit(site, NAME, parse({"rewrite_sort_columns": "tags"}), (), reset=False)
    with pytest.raises(UsageError, match="tags holds arrays"):
        edit(site, NAME, parse({"rewrite_zorder_columns": "ts,tags"}), ["rewrite_sort_columns"], reset=False)


def test_a_policy_that_somebody_else_has_changed_meanwhile_is_not_overwritten(site: Site) -> None:
    def meanwhile(point: str) -> None:
        if point == "policy.before_edit":
            faults.watch(None)
            edit(site, NAME, parse({"orphan_grace_hours": "9"}), (), reset=False)

    faults.watch(meanwhile)
    with pytest.raises(Conflict, match="Somebody else"):
        edit(site, NAME, parse({"orphan_grace_hours": "7"}), (), reset=False)
    assert stored(site) == {"orphan_grace_hours": 9}


@pytest.mark.parametrize("point", ["policy.before_edit", "policy.after_edit"])
def test_a_crash_leaves_the_old_policy_or_the_new_one(site: Site, point: str) -> None:
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        edit(site, NAME, parse({"orphan_grace_hours": "7"}), (), reset=False)
    assert stored(site) == ({} if point == "policy.before_edit" else {"orphan_grace_hours": 7})


@pytest.mark.parametrize("value", ['"many"', "true", "0", "20000000000"])
def test_a_value_that_somebody_wrote_by_hand_is_named_with_the_way_out(site: Site, value: str) -> None:
    with site.connect(autocommit=True) as conn:
        conn.execute(
            "UPDATE modak.tables SET maintenance_policy = jsonb_build_object('snapshot_min_retained', %s::jsonb)",
            (value,),
        )
    with pytest.raises(UsageError, match="snapshot_min_retained") as refused:
        of(site, site.reader.state(NAME).table)
    assert "--unset snapshot_min_retained" in refused.value.hint
    edit(site, NAME, {}, ["snapshot_min_retained"], reset=False)
    assert stored(site) == {}
    with site.connect(autocommit=True) as conn, pytest.raises(psycopg.Error):
        conn.execute("UPDATE modak.tables SET maintenance_policy = '[]'")


def test_the_command_shows_every_key_and_where_it_comes_from(site: Site, modak: Any, monkeypatch: Any) -> None:  # noqa: F811
    environ = {
        "MODAK_PG_URL": site.dsn.safe(),
        "MODAK_PG_PASSWORD": site.dsn.password,
        "MODAK_SNAPSHOT_RETENTION_HOURS": "30",
    }
    shown = modak("policy", "--table", "public.events", **environ)
    assert shown.exit_code == 0, shown.output
    lines = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines()}
    assert set(lines) == set(keys_of("iceberg"))
    assert lines["snapshot_retention_hours"] == ["30", "(default)"]
    edited = modak(
        "policy",
        "--table",
        "events",
        "--set",
        "snapshot_retention_hours=6",
        "--set",
        "rewrite_enabled=false",
        **environ,
    )
    lines = {line.split()[0]: line.split()[1:] for line in edited.stdout.splitlines()}
    assert lines["snapshot_retention_hours"] == ["6", "(table)"]
    assert lines["rewrite_enabled"] == ["false", "(table)"]
    assert lines["orphan_grace_hours"] == ["72", "(default)"]
    assert modak("policy", "--table", "events", "--unset", "rewrite_enabled", **environ).exit_code == 0
    assert stored(site) == {"snapshot_retention_hours": 6}
    assert "(table)" not in modak("policy", "--table", "events", "--reset", **environ).stdout
    missing = modak("policy", "--table", "public.nothing", **environ)
    assert (missing.exit_code, "not registered" in missing.stderr) == (1, True)


def test_the_keys_belong_to_the_format() -> None:
    with pytest.raises(UsageError, match="hudi"):
        keys_of("hudi")
