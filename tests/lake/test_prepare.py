"""A prepared commit is exactly what Iceberg's own commit would have made, only invisible until the swap."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from modak.core.errors import ModakError
from modak.lake.changes import (
    AddColumn,
    Append,
    Change,
    CreateTag,
    DeleteRange,
    DropColumn,
    ExpireSnapshots,
    MakeOptional,
    Overwrite,
    Range,
    RemoveTag,
    RenameColumn,
    Rewrite,
    RowDelta,
    SetProperties,
    WidenColumn,
)
from modak.lake.iceberg import updates
from modak.lake.model import LakeName, attempt_folder, pin_tag
from tests.lake.iceberg_support import Lab, only, rows, shape, table_folder

Step = Callable[[Lab, LakeName], Change]


def _append(*keys: int) -> Step:
    return lambda lab, name: Append(lab.write(name, rows(*keys)))


def _correct(lab: Lab, name: LakeName) -> Change:
    target = next(file for file in only(lab, name) if file.file.rows == 3)
    old = target.vectors[0] if target.vectors else None
    position = 1 if old else 0
    return RowDelta(
        rows=lab.write(name, rows(position, note="corrected")),
        vectors=(lab.vector(name, [position], target.file, old),),
        removed_vectors=(old,) if old else (),
        validate_from=lab.table(name).snapshot_id,
        no_new_rows_in=Range("at", 0, 100),
    )


def _rewrite(lab: Lab, name: LakeName) -> Change:
    target = next(file for file in only(lab, name) if file.vectors)
    kept = [row for row in rows(0, 1, 2) if row["id"] > 1]
    base = lab.table(name).snapshot_id
    assert base is not None
    return Rewrite((target.file,), lab.write(name, kept), validate_from=base)


STEPS: dict[str, Step] = {
    "first append": _append(0, 1, 2, 150),
    "second append": _append(200, 250),
    "first correction": _correct,
    "second correction replaces the vector": _correct,
    "rewrite drops the vector": _rewrite,
    "tag": lambda lab, name: CreateTag(pin_tag(lab.ids(name)[0]), lab.ids(name)[0]),
    "overwrite": lambda lab, name: Overwrite("at", 100, 200, lab.write(name, rows(120, 130))),
    "retention": lambda lab, name: DeleteRange("at", None, 100),
    "add column": lambda lab, name: AddColumn("size", "int", "7"),
    "widen": lambda lab, name: WidenColumn("size", "long"),
    "rename": lambda lab, name: RenameColumn("note", "remark"),
    "make optional": lambda lab, name: MakeOptional("id"),
    "drop column": lambda lab, name: DropColumn("size"),
    "properties": lambda lab, name: SetProperties({"a": "1", "b": "2"}),
    "fewer properties": lambda lab, name: SetProperties({}, frozenset({"a"})),
    "remove tag": lambda lab, name: RemoveTag(pin_tag(lab.ids(name)[0])),
    "last append": lambda lab, name: Append(lab.write(name, [{"id": 300, "at": 300, "remark": "last"}])),
}


def test_every_kind_of_change_equals_the_stock_commit_step_by_step(lab: Lab) -> None:
    ours, stock = lab.create(), lab.create()
    for title, step in STEPS.items():
        change, twin = step(lab, ours), step(lab, stock)
        lab.commit(ours, change)
        lab.stock(stock, twin)
        assert shape(lab, ours) == shape(lab, stock), title
        assert lab.pyiceberg(ours) == lab.pyiceberg(stock) == lab.duckdb(ours) == lab.duckdb(stock), title
    assert [row["id"] for row in lab.pyiceberg(ours)] == [120, 130, 200, 250, 300]


def test_nothing_is_visible_before_the_swap(lab: Lab) -> None:
    name = lab.create()
    before = lab.table(name)
    prepared = lab.lake.prepare(name, lab.op(), 1, [Append(lab.write(name, rows(1)))])
    assert lab.table(name) == before
    assert lab.pyiceberg(name) == []
    assert lab.publish(prepared)
    assert lab.table(name).metadata_location == prepared.new_location
    assert lab.table(name).snapshot_id == prepared.snapshot_id
    assert lab.pyiceberg(name) == rows(1)


def test_an_attempt_writes_into_its_own_folder_and_the_metadata_beside_the_old_one(lab: Lab) -> None:
    name = lab.create()
    op = lab.op()
    files = lab.write(name, rows(1))
    before = table_folder(lab, name)
    prepared = lab.lake.prepare(name, op, 7, [Append(files)])
    new = table_folder(lab, name) - before
    folder = attempt_folder(lab.table(name).location, op, 7)
    assert prepared.attempt_folder == folder
    assert {uri for uri in new if not uri.startswith(folder + "/")} == {prepared.new_location}
    assert prepared.new_location.rpartition("/")[0] == f"{lab.table(name).location}/metadata"
    assert prepared.new_location.rpartition("/")[2].startswith("00001-")
    assert len(new) == 3, "a manifest, a manifest list and the metadata"
    assert lab.publish(prepared)
    assert "write.metadata.path" not in lab.table(name).properties


def test_the_users_own_metadata_path_survives_a_commit(lab: Lab) -> None:
    name = lab.create()
    own = f"{lab.table(name).location}/elsewhere"
    lab.commit(name, SetProperties({"write.metadata.path": own}))
    prepared = lab.commit(name, Append(lab.write(name, rows(1))))
    assert lab.table(name).properties["write.metadata.path"] == own
    assert prepared.new_location.startswith(own)
    lab.commit(name, SetProperties({}, frozenset({"write.metadata.path"})), SetProperties({"a": "1"}))
    assert "write.metadata.path" not in lab.table(name).properties


def test_changes_of_one_commit_land_together(lab: Lab) -> None:
    name = lab.create()
    first = lab.commit(name, Append(lab.write(name, rows(1))))
    assert first.snapshot_id is not None
    prepared = lab.commit(
        name,
        Append(lab.write(name, rows(2))),
        AddColumn("size", "long", "5"),
        SetProperties({"k": "v"}),
        Append(lab.write(name, rows(300))),
        tag=[first.snapshot_id],
    )
    table = lab.table(name)
    assert table.snapshot_count == 3
    assert table.tags == {pin_tag(first.snapshot_id): first.snapshot_id}
    assert table.properties["k"] == "v"
    assert prepared.tagged == {first.snapshot_id}
    assert prepared.base_snapshot_id == first.snapshot_id
    assert prepared.summary["total-records"] == "3"
    assert lab.duckdb(name) == lab.pyiceberg(name) == [{**row, "size": 5} for row in rows(1, 2, 300)]


def test_a_snapshot_that_is_tagged_already_is_not_tagged_again(lab: Lab) -> None:
    name = lab.create()
    first = lab.commit(name, Append(lab.write(name, rows(1)))).snapshot_id
    assert first is not None
    assert lab.commit(name, Append(lab.write(name, rows(2))), tag=[first]).tagged == {first}
    assert lab.commit(name, Append(lab.write(name, rows(3))), tag=[first]).tagged == {first}


def test_every_snapshot_says_which_operation_made_it(lab: Lab) -> None:
    name = lab.create()
    op = lab.op()
    assert lab.publish(lab.lake.prepare(name, op, 1, [Append(lab.write(name, rows(1)))], kind="tiering"))
    (snapshot,) = lab.lake.snapshots(lab.table(name))
    assert snapshot.operation == "append"
    assert snapshot.summary["modak.op-id"] == op
    assert snapshot.summary["modak.kind"] == "tiering"


def test_a_commit_that_changes_nothing_is_refused(lab: Lab) -> None:
    name = lab.create()
    lab.commit(name, SetProperties({"k": "v"}))
    for changes in ([], [SetProperties({"k": "v"})]):
        with pytest.raises(ModakError) as caught:
            lab.lake.prepare(name, lab.op(), 1, changes)
        assert caught.value.code == "lake.nothing_changed"


def test_trap_a_forgotten_commit_of_the_last_update_is_silently_missing(lab: Lab) -> None:
    transaction = lab.java_table(lab.create()).newTransaction()
    transaction.updateProperties().set("k", "v")
    assert transaction.currentMetadata().equals(transaction.startMetadata())


def test_a_forgotten_commit_of_one_update_is_noticed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    name = lab.create()
    files = lab.write(name, rows(1))

    def forgetful(self: updates.Updates, change: Change) -> None:
        update = self._build(change)
        if not isinstance(change, Append):
            update.commit()

    monkeypatch.setattr(updates.Updates, "apply", forgetful)
    before = lab.table(name)
    with pytest.raises(ModakError, match="has not committed"):
        lab.lake.prepare(name, lab.op(), 1, [SetProperties({"k": "v"}), Append(files)])
    assert lab.table(name) == before


def test_an_attempt_cannot_overwrite_the_metadata_of_an_earlier_one(lab: Lab) -> None:
    name = lab.create()
    op = lab.op()
    lab.lake.prepare(name, op, 1, [Append(lab.write(name, rows(1)))])
    with pytest.raises(ModakError) as caught:
        lab.lake.prepare(name, op, 1, [Append(lab.write(name, rows(1)))])
    assert caught.value.code == "lake.attempt_reused"
    assert lab.publish(lab.lake.prepare(name, op, 2, [Append(lab.write(name, rows(1)))]))


def test_metadata_files_that_fall_out_of_the_log_are_named(lab: Lab) -> None:
    name = lab.create(properties={"write.metadata.previous-versions-max": "2"})
    locations = [lab.table(name).metadata_location]
    for key in range(4):
        prepared = lab.commit(name, SetProperties({"k": str(key)}))
        fallen = locations[key - 2] if key >= 2 else None
        assert prepared.obsolete == ((fallen,) if fallen else ()), key
        locations.append(prepared.new_location)


def test_manifests_merged_away_while_preparing_are_leftovers_and_nothing_else_is(lab: Lab) -> None:
    from modak.storage import Store

    name = lab.create(properties={"commit.manifest.min-count-to-merge": "2"})
    prepared = lab.commit(name, *(Append(lab.write(name, rows(key))) for key in (1, 2, 3)))
    leftovers = lab.lake.unreferenced(prepared.attempt_folder, prepared.new_location)
    listed = {uri for uri in table_folder(lab, name) if uri.startswith(prepared.attempt_folder)}
    assert set(leftovers) < listed
    used = lab.lake.referenced_in(prepared.attempt_folder, prepared.new_location)
    assert used == listed - set(leftovers)
    assert Store.of(lab.lake.warehouse).delete(leftovers) == len(leftovers)
    for snapshot in lab.ids(name):
        lab.pyiceberg(name, snapshot)
    assert lab.duckdb(name) == lab.pyiceberg(name) == rows(1, 2, 3)
    assert lab.lake.unreferenced(prepared.attempt_folder, prepared.new_location) == []


def test_files_stay_referenced_through_later_commits_and_until_their_snapshots_go(lab: Lab) -> None:
    name = lab.create()
    prepared = lab.commit(name, Append(lab.write(name, rows(1))))
    lab.commit(name, Append(lab.write(name, rows(2))))
    before = lab.lake.referenced_in(prepared.attempt_folder, prepared.new_location)
    assert lab.lake.referenced_in(prepared.attempt_folder, lab.table(name).metadata_location) == before
    assert prepared.snapshot_id is not None
    lab.commit(name, ExpireSnapshots((prepared.snapshot_id,)))
    after = lab.lake.referenced_in(prepared.attempt_folder, lab.table(name).metadata_location)
    assert after < before
    assert len(after) == 1, "the manifest lives on, its list does not"
