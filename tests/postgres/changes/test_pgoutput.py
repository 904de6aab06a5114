"""The decoder on messages made by hand: what each kind of message becomes, and what is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.core.errors import ModakError
from modak.postgres.changes.batch import Changes, Op, Piece, Truncation
from modak.postgres.changes.pgoutput import Decoder
from modak.postgres.changes.wire import Messages
from tests.postgres.changes.build import (
    INT8,
    TEXT,
    UNCHANGED,
    begin,
    commit,
    delete,
    headers,
    insert,
    relation,
    replay,
    rows_of,
    truncate,
    types,
    update,
)

T = [("k", INT8), ("v", TEXT)]
FEW = [
    begin(100, xid=7),
    relation(1, "t", T),
    insert(1, [1, "one"]),
    insert(1, [2, None]),
    relation(2, "u", T),
    insert(2, [9, "other"]),
    commit(100, 110),
    begin(120, xid=8),
    update(1, [1, "uno"], old=[1, "one"]),
    delete(1, [2, None]),
    insert(1, [3, ""]),
    commit(120, 130),
]


def decoded(messages: list[bytes], after: int = 0) -> Piece:
    return Decoder(types, after).feed(Messages.of_parts(messages))


def only(piece: Piece) -> Changes:
    (item,) = piece.items
    assert isinstance(item, Changes)
    return item


def test_transactions_become_one_batch_per_table() -> None:
    piece = decoded(FEW)
    first, second = piece.items
    assert isinstance(first, Changes)
    assert isinstance(second, Changes)
    assert (first.relation.name.name, second.relation.name.name) == ("t", "u")
    assert [(column.name, column.key) for column in first.relation.columns] == [("k", True), ("v", False)]
    assert first.header.to_pydict() | {"commit_time": None} == {
        "op": [1, 1, 2, 3, 1],
        "old": [0, 0, 2, 2, 0],
        "commit_lsn": [100, 100, 120, 120, 120],
        "end_lsn": [110, 110, 130, 130, 130],
        "xid": [7, 7, 8, 8, 8],
        "position": [0, 1, 0, 1, 2],
        "commit_time": None,
    }
    assert second.header["position"].to_pylist() == [2]
    assert (piece.frontier, piece.unfinished, piece.rows) == (130, False, 6)
    assert replay([piece], "t") == {(1,): {"k": 1, "v": "uno"}, (3,): {"k": 3, "v": ""}}


def test_times_are_moments_in_utc() -> None:
    piece = decoded([begin(1, time=-1), relation(1, "t", T), insert(1, [1, "x"]), commit(1, 2)])
    assert str(only(piece).header["commit_time"][0]) == "1999-12-31 23:59:59.999999+00:00"


@given(st.lists(st.integers(1, len(FEW) - 1), unique=True).map(sorted))
def test_wherever_the_stream_is_cut_the_changes_are_the_same(cuts: list[int]) -> None:
    decoder = Decoder(types)
    pieces = [
        decoder.feed(Messages.of_parts(FEW[low:high])) for low, high in zip([0, *cuts], [*cuts, len(FEW)], strict=True)
    ]
    assert headers(pieces) == headers([decoded(FEW)])
    assert replay(pieces, "t") == replay([decoded(FEW)], "t")
    assert [piece.frontier for piece in pieces if piece.frontier is not None][-1] == 130
    assert not pieces[-1].unfinished


def test_a_transaction_that_is_not_over_has_no_end_and_no_frontier() -> None:
    piece = decoded(FEW[:4])
    assert only(piece).header["end_lsn"].to_pylist() == [None, None]
    assert (piece.frontier, piece.unfinished) == (None, True)


def test_the_transaction_whose_commit_begins_where_the_last_one_ended_is_not_passed_over() -> None:
    adjacent = [*FEW[:7], begin(110, xid=8), insert(1, [5, "next"]), commit(110, 120)]
    piece = decoded(adjacent, after=110)
    assert only(piece).header["xid"].to_pylist() == [8]
    assert piece.frontier == 120


def test_commits_before_the_frontier_are_passed_over_with_their_truncations() -> None:
    piece = decoded([begin(1), relation(1, "t", T), truncate([1]), insert(1, [1, "x"]), commit(1, 5)], after=5)
    assert piece.items == ()
    assert piece.frontier == 5


def test_an_unchanged_value_is_neither_null_nor_empty() -> None:
    messages = [begin(1), relation(1, "t", T), update(1, [1, UNCHANGED]), update(1, [2, None]), commit(1, 2)]
    changes = only(decoded(messages))
    assert changes.new is not None
    assert changes.old is None
    assert changes.new.unchanged(0) is None
    assert changes.new.unchanged(1) == pa.array([True, False])
    assert [row["v"] for row in rows_of(changes.new)] == [UNCHANGED, None]


def test_a_value_that_was_not_sent_is_completed_from_a_whole_old_row_only() -> None:
    messages = [
        begin(1),
        relation(1, "t", T),
        insert(1, [1, "new"]),
        update(1, [2, UNCHANGED], old=[2, "from the old row"]),
        update(1, [3, UNCHANGED], old=[4, None], kind="K"),
        update(1, [5, None], old=[5, "was"]),
        commit(1, 2),
    ]
    values, unknown = only(decoded(messages)).completed(1)
    assert values.to_pylist() == ["new", "from the old row", None, None]
    assert unknown == pa.array([False, False, True, False])
    values, unknown = only(decoded(messages)).completed(0)
    assert (values.to_pylist(), unknown) == ([1, 2, 3, 5], None)


def test_an_old_key_is_told_from_a_whole_old_row() -> None:
    messages = [
        begin(1),
        relation(1, "t", T),
        insert(1, [1, "x"]),
        update(1, [2, "x"], old=[1, None], kind="K"),
        delete(1, [2, None], kind="K"),
        commit(1, 2),
    ]
    changes = only(decoded(messages))
    assert changes.header["old"].to_pylist() == [0, 1, 1]
    assert changes.old is not None
    assert changes.old.column(0).to_pylist() == [None, 1, 2]
    assert replay([decoded(messages)], "t") == {}


def test_a_truncation_stands_between_what_came_before_and_after() -> None:
    messages = [
        begin(1),
        relation(1, "t", T),
        insert(1, [1, "before"]),
        relation(2, "u", T),
        truncate([1, 2], options=3),
        insert(1, [2, "after"]),
        commit(1, 2),
    ]
    before, cut, after = decoded(messages).items
    assert isinstance(cut, Truncation)
    assert [each.name.name for each in cut.relations] == ["t", "u"]
    assert (cut.cascade, cut.restart_identity, cut.commit_lsn, cut.position) == (True, True, 1, 1)
    assert isinstance(before, Changes)
    assert isinstance(after, Changes)
    assert after.header["position"].to_pylist() == [2]
    assert replay([decoded(messages)], "t") == {(2,): {"k": 2, "v": "after"}}


def test_a_table_announced_again_begins_a_new_version_even_if_it_looks_the_same() -> None:
    messages = [
        begin(1),
        relation(1, "t", T),
        insert(1, [1, "x"]),
        relation(1, "t", [*T, ("w", INT8)]),
        insert(1, [2, "y", 5]),
        relation(1, "t", [*T, ("w", INT8)]),
        insert(1, [3, "z", 6]),
        commit(1, 2),
    ]
    versions = decoded(messages).items
    assert [(item.version, len(item.relation.columns)) for item in versions if isinstance(item, Changes)] == [
        (1, 2),
        (2, 3),
        (3, 3),
    ]


def test_origins_types_and_logical_messages_are_passed_over() -> None:
    others = [
        b"O" + bytes(8) + b"elsewhere\0",
        b"Y" + bytes(4) + b"public\0mood\0",
        b"M" + bytes(9) + b"p\0" + bytes(4),
    ]
    assert (
        only(decoded([begin(1), *others, relation(1, "t", T), insert(1, [1, "x"]), commit(1, 2)])).header.num_rows == 1
    )


def test_an_unknown_message_is_refused_by_its_kind() -> None:
    with pytest.raises(ModakError, match="'Z'") as refusal:
        decoded([begin(1), b"Zwhat", commit(1, 2)])
    assert refusal.value.code == "changes.unknown_message"


@pytest.mark.parametrize(
    "messages",
    [
        [begin(1), insert(1, [1, "x"])],
        [begin(1), relation(1, "t", T), insert(1, [1, "x"])[:-1]],
        [begin(1), relation(1, "t", T), insert(1, [1, "x"]) + b"!"],
        [begin(1), relation(1, "t", T), insert(1, [1])],
        [begin(1), relation(1, "t", T), insert(1, [1, "x"]).replace(b"t\0\0\0\1x", b"q\0\0\0\1x")],
        [begin(1), relation(1, "t", T), insert(1, [1, "x"]).replace(b"N", b"O")],
        [relation(1, "t", T), insert(1, [1, "x"])],
        [begin(1), commit(2, 3)],
        [commit(2, 3)],
        [begin(1), b""],
        [begin(1)[:5]],
    ],
)
def test_broken_messages_are_refused_and_never_guessed_at(messages: list[bytes]) -> None:
    with pytest.raises(ModakError) as refusal:
        decoded(messages)
    assert refusal.value.code == "changes.malformed"


def test_a_slice_of_a_larger_column_is_decoded_like_the_whole() -> None:
    column = pa.array([b"padding", *FEW, b"more"], pa.large_binary())[1:-1]
    assert headers([Decoder(types).feed(Messages.of_column(column))]) == headers([decoded(FEW)])


def test_no_messages_give_an_empty_piece() -> None:
    assert decoded([]) == Piece((), None, unfinished=False)
    assert Op.INSERT == 1
