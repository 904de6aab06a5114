"""Somebody else changed the lake table: every way in which that can happen is noticed before the swap, or by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from py4j.protocol import Py4JJavaError

from modak.core.errors import Conflict, Refused
from modak.lake.changes import (
    AddColumn,
    Append,
    Change,
    CreateTag,
    DeleteRange,
    DropColumn,
    ExpireSnapshots,
    Overwrite,
    Range,
    RemoveTag,
    RenameColumn,
    Rewrite,
    RowDelta,
    WidenColumn,
)
from modak.lake.model import LakeName
from tests.lake.iceberg_support import Lab, only, rows


@pytest.fixture
def name(lab: Lab) -> LakeName:
    """A table with one file in each of two partitions."""
    made = lab.create()
    lab.commit(made, Append(lab.write(made, rows(1, 2, 3, 150))))
    return made


def _first(lab: Lab, name: LakeName, position: int = 0, **more: object) -> RowDelta:
    """A correction of one row of the first file, planned on the present state."""
    file = next(file for file in only(lab, name) if file.lower == 1)
    made = {"vectors": (lab.vector(name, [position], file.file),), "validate_from": lab.table(name).snapshot_id}
    return RowDelta(**{**made, **more})  # type: ignore[arg-type]


def _refused(lab: Lab, name: LakeName, change: Change) -> Conflict:
    with pytest.raises(Conflict) as caught:
        lab.lake.prepare(name, lab.op(), 1, [change])
    assert caught.value.code == "lake.changed_underneath"
    assert caught.value.retryable
    return caught.value


def test_a_foreign_commit_between_prepare_and_swap_wins_and_nothing_is_lost(lab: Lab, name: LakeName) -> None:
    op = lab.op()
    files = lab.write(name, rows(4))
    prepared = lab.lake.prepare(name, op, 1, [Append(files)])
    lab.foreign(name, lab.write(name, rows(5)))
    assert not lab.publish(prepared)
    assert lab.publish(lab.lake.prepare(name, op, 2, [Append(files)]))
    assert lab.pyiceberg(name) == lab.duckdb(name) == rows(1, 2, 3, 4, 5, 150)


def test_a_stock_commit_prepared_before_our_swap_is_retried_by_its_own_client(lab: Lab, name: LakeName) -> None:
    table = lab.java_table(name)
    lab.commit(name, Append(lab.write(name, rows(4))))
    table.updateProperties().set("foreign", "1").commit()
    assert lab.table(name).properties["foreign"] == "1"
    assert lab.pyiceberg(name) == rows(1, 2, 3, 4, 150)


def _delete_the_file(lab: Lab, name: LakeName) -> None:
    lab.stock(name, DeleteRange("at", None, 100))


def _delete_another_row(lab: Lab, name: LakeName) -> None:
    lab.stock(name, _first(lab, name, 1))


def _insert_in_range(lab: Lab, name: LakeName) -> None:
    lab.foreign(name, lab.write(name, rows(7)))


def _expire_the_base(lab: Lab, name: LakeName) -> None:
    base = lab.table(name).snapshot_id
    assert base is not None
    lab.foreign(name, lab.write(name, rows(400)))
    lab.stock(name, ExpireSnapshots((base,)))


@pytest.mark.parametrize("meanwhile", [_delete_the_file, _delete_another_row, _insert_in_range, _expire_the_base])
def test_a_row_delta_notices_what_happened_since_its_base(
    lab: Lab, name: LakeName, meanwhile: Callable[[Lab, LakeName], None]
) -> None:
    change = _first(lab, name, rows=lab.write(name, rows(1, note="new")), no_new_rows_in=Range("at", 0, 100))
    meanwhile(lab, name)
    _refused(lab, name, change)


def test_a_row_delta_does_not_mind_foreign_rows_elsewhere(lab: Lab, name: LakeName) -> None:
    change = _first(lab, name, rows=lab.write(name, rows(1, note="new")), no_new_rows_in=Range("at", 0, 100))
    lab.foreign(name, lab.write(name, rows(200)))
    lab.commit(name, change)
    expected = [*rows(1, note="new"), *rows(2, 3, 150, 200)]
    assert lab.pyiceberg(name) == lab.duckdb(name) == expected


def test_an_expired_base_raises_something_else_than_a_failed_validation(lab: Lab, name: LakeName) -> None:
    base = lab.table(name).snapshot_id
    _expire_the_base(lab, name)
    file = only(lab, name)[0]
    update = lab.java_table(name).newTransaction().newRowDelta().validateFromSnapshot(base)
    update.validateDataFilesExist(lab.java.strings([file.file.path]))
    with pytest.raises(Py4JJavaError) as caught:
        update.commit()
    assert caught.value.java_exception.getClass().getName() == "java.lang.IllegalArgumentException"


def test_a_rewrite_notices_a_vector_that_came_later(lab: Lab, name: LakeName) -> None:
    base = lab.table(name).snapshot_id
    assert base is not None
    old = next(file for file in only(lab, name) if file.lower == 1)
    change = Rewrite((old.file,), lab.write(name, rows(1, 2, 3)), validate_from=base)
    _delete_another_row(lab, name)
    _refused(lab, name, change)


def test_a_rewrite_notices_that_its_files_or_its_base_are_gone(lab: Lab, name: LakeName) -> None:
    base = lab.table(name).snapshot_id
    assert base is not None
    old = next(file for file in only(lab, name) if file.lower == 1)
    added = lab.write(name, rows(1, 2, 3))
    _delete_the_file(lab, name)
    _refused(lab, name, Rewrite((old.file,), added, validate_from=base))
    _expire_the_base(lab, name)
    lab.stock(name, ExpireSnapshots((base,)))
    _refused(lab, name, Rewrite((old.file,), added, validate_from=base))


def test_an_overwrite_notices_rows_that_came_later(lab: Lab, name: LakeName) -> None:
    base = lab.table(name).snapshot_id
    change = Overwrite("at", 0, 100, lab.write(name, rows(9)), validate_from=base)
    _insert_in_range(lab, name)
    _refused(lab, name, change)


def test_tags_and_snapshots_that_are_gone_are_a_conflict(lab: Lab, name: LakeName) -> None:
    _refused(lab, name, CreateTag("x", 12345))
    _refused(lab, name, RemoveTag("no-such-tag"))


def test_only_whole_files_leave_by_range(lab: Lab, name: LakeName) -> None:
    misfit = Overwrite("at", 0, 100, lab.write(name, rows(500)))
    for change in (DeleteRange("at", None, 2), DeleteRange("at", 3, None), misfit):
        with pytest.raises(Refused) as caught:
            lab.lake.prepare(name, lab.op(), 1, [change])
        assert caught.value.code == "lake.partial_file"
    assert lab.pyiceberg(name) == rows(1, 2, 3, 150)


@pytest.mark.parametrize(
    "change",
    [
        AddColumn("note", "string"),
        RenameColumn("nobody", "somebody"),
        RenameColumn("note", "id"),
        DropColumn("nobody"),
        DropColumn("at"),
        WidenColumn("note", "long"),
        WidenColumn("id", "int"),
    ],
)
def test_impossible_changes_of_columns_are_refused_for_good(lab: Lab, name: LakeName, change: Change) -> None:
    with pytest.raises(Refused) as caught:
        lab.lake.prepare(name, lab.op(), 1, [change])
    assert caught.value.code == "lake.schema"
    assert not caught.value.retryable


def test_a_table_that_does_not_exist_is_named(lab: Lab) -> None:
    with pytest.raises(Refused) as caught:
        lab.lake.prepare(lab.lake.name("public", "nobody"), lab.op(), 1, [])
    assert caught.value.code == "lake.no_such_table"
