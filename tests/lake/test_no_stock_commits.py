"""Only the one transaction makes a lake commit visible: no line of the source asks Iceberg or Spark to commit.

A stock client that loses the acknowledgement of its commit believes that it failed and deletes the manifests of the
snapshot that landed. So every update goes into an Iceberg transaction, in memory, and the transaction is never
committed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import modak

SOURCE = Path(modak.__file__).parent
PREPARING = {"lake/iceberg/prepare.py", "lake/iceberg/updates.py"}
"""The files that end updates inside a transaction."""

_UPDATES = frozenset(
    {
        "expireSnapshots",
        "manageSnapshots",
        "newAppend",
        "newDelete",
        "newFastAppend",
        "newOverwrite",
        "newReplacePartitions",
        "newRewrite",
        "newRowDelta",
        "replaceSortOrder",
        "rewriteManifests",
        "updateLocation",
        "updatePartitionStatistics",
        "updateProperties",
        "updateSchema",
        "updateSpec",
        "updateStatistics",
    }
)
"""What both a table and a transaction offer: a table's own makes its commit visible."""
_VISIBLE = frozenset(
    {
        "commitTransaction",
        "createTable",
        "dropTable",
        "insertInto",
        "registerTable",
        "renameTable",
        "saveAsTable",
        "writeTo",
    }
)
"""What makes a change of the lake visible whoever it is called on."""
_TRANSACTIONS = frozenset({"newTransaction", "createTransaction"})
_NOT_ICEBERG = frozenset({"conn", "output"})
"""Who else commits: a connection to Postgres, a file being written."""
_WORTH_PARSING = re.compile("|".join([r"\.\s*commit\b", *sorted(_UPDATES | _VISIBLE)]))


def stock_commits(source: str, *, preparing: bool) -> list[str]:
    """The places in a file that make a lake commit visible, or might."""
    if not preparing and not _WORTH_PARSING.search(source):
        return []
    return [f"{node.lineno}: {ast.unparse(node)}" for node in _found(ast.parse(source), preparing)]


def _found(tree: ast.Module, preparing: bool) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) if name in _VISIBLE:
                yield node
            case ast.Attribute(attr=name, value=receiver) if name in _UPDATES and _name(receiver) != "transaction":
                yield node
            case ast.Constant(value=str(name)) if name in _UPDATES and not preparing:
                yield node
            case ast.Call(func=ast.Name(id="getattr"), args=[receiver, *_]) if preparing:
                if _name(receiver) != "transaction":
                    yield node
            case ast.Attribute(attr="commit", value=receiver) if not preparing and _name(receiver) not in _NOT_ICEBERG:
                yield node
            case ast.Assign(targets=[target], value=value) if _name(target) == "transaction" and preparing:
                if not _begins(value):
                    yield value


def _name(node: ast.expr) -> str | None:
    """What a receiver is called, be it a variable or a field."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lstrip("_")
    return None


def _begins(value: ast.expr) -> bool:
    match value:
        case ast.Name(id="transaction"):
            return True
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in _TRANSACTIONS
    return False


def test_no_source_file_makes_a_stock_commit() -> None:
    files = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
    found = {
        name: stock_commits(path.read_text(encoding="utf-8"), preparing=name in PREPARING)
        for name, path in files.items()
    }
    assert set(found) >= PREPARING
    assert {path: places for path, places in found.items() if places} == {}


@pytest.mark.parametrize(
    "source",
    [
        "table.newTransaction().commitTransaction()",
        "java.method('.Transaction', 'commitTransaction', 'void')",
        "table.updateProperties().set('a', '1').commit()",
        "table.newAppend()",
        "transaction.table().newRowDelta()",
        "getattr(table, producer)()",
        "transaction = catalog.loadTable(name)",
        "catalog.createTable(name, schema)",
        "frame.writeTo('modak.public.events').append()",
    ],
)
def test_the_guard_sees_a_stock_commit_even_where_commits_are_prepared(source: str) -> None:
    assert stock_commits(source, preparing=True)


@pytest.mark.parametrize(
    "source",
    ["update.commit()", "lake.load(name).operations().commit(base, new)", "getattr(table, 'newAppend')()"],
)
def test_the_guard_sees_an_update_that_ends_outside_of_the_preparation(source: str) -> None:
    assert stock_commits(source, preparing=False)


@pytest.mark.parametrize(
    "source", ["conn.commit()", "self._conn.commit()", "file.output.commit()", "size = self._output.commit()"]
)
def test_the_guard_leaves_postgres_and_files_alone(source: str) -> None:
    assert stock_commits(source, preparing=False) == []


def test_the_guard_leaves_updates_inside_a_transaction_alone() -> None:
    source = "transaction = table.newTransaction()\ntransaction.updateProperties().set('a', '1').commit()"
    assert stock_commits(source, preparing=True) == []
