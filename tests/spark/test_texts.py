"""Rows of a body as texts: the line of each, and lines that are long."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from modak.core.errors import ModakError
from modak.spark import texts
from modak.spark.texts import CSV_PIECE, LONGEST_LINE, TextColumn, read_texts

COLUMNS = [TextColumn("id"), TextColumn("ts"), TextColumn("body")]


def _csv(path: Path, body: str) -> tuple[dict[int, str], dict[int, str]]:
    path.write_text(body)
    rows: dict[int, str] = {}
    faults: dict[int, str] = {}
    for found in read_texts(path, "csv", COLUMNS):
        rows |= dict(zip(found.lines.to_pylist(), found.rows.column("id").to_pylist(), strict=True))
        faults |= dict(found.faults)
    return rows, faults


def test_csv_rows_have_the_line_that_they_begin_on(tmp_path: Path) -> None:
    body = 'id,ts,body\na,2,x\nb,4\nc,6,y\nd,8,"two\nlines"\ne,1,z\n"f\n",2\ng,1,z\nh\n'
    rows, faults = _csv(tmp_path / "body", body)
    assert rows == {2: "a", 4: "c", 5: "d", 7: "e", 10: "g"}
    assert faults == {3: "has 2 values, not 3", 8: "has 2 values, not 3", 11: "has 1 values, not 3"}


def test_lines_of_csv_are_right_over_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "CSV_PIECE", 512)
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    lines, wanted, bad = ["id,ts,body"], {}, set()
    for _ in range(500):
        at = len(lines) + 1
        match chance.randrange(6):
            case 0:
                lines.append(f"{at},1")
                bad.add(at)
            case 1:
                lines += [f'{at},1,"some', 'more"']
                wanted[at] = str(at)
            case _:
                lines.append(f"{at},1,x")
                wanted[at] = str(at)
    rows, faults = _csv(tmp_path / "body", "\n".join(lines) + "\n")
    assert (rows, set(faults)) == (wanted, bad), seed


def test_json_lines_keep_their_numbers_without_a_last_line_break_and_with_odd_bytes(tmp_path: Path) -> None:
    path = tmp_path / "body"
    path.write_bytes(b'{"id": 1}\r\n\n   \n{"id": 2, "body": "\xff\x00"}\nno\n{"id": 3}')
    found = list(read_texts(path, "jsonl", COLUMNS))
    assert [line for some in found for line in some.lines.to_pylist()] == [1, 4, 6]
    assert [row["id"] for some in found for row in some.rows.to_pylist()] == ["1", "2", "3"]
    assert [fault for some in found for fault in some.faults] == [(5, "is not a JSON object")]


def test_a_long_line_is_a_row_and_one_too_long_is_named(tmp_path: Path) -> None:
    path = tmp_path / "body"
    size = LONGEST_LINE - 1000
    path.write_text('{"id": 1}\n{"id": 2, "ts": 5, "body": "' + "y" * size + '"}\n{"id": 3}\n')
    rows = [row for found in read_texts(path, "jsonl", COLUMNS) for row in found.rows.to_pylist()]
    assert [row["id"] for row in rows] == ["1", "2", "3"]
    assert len(rows[1]["body"]) == size
    path.write_text('{"id": 1}\n{"id": 2, "body": "' + "y" * (2 * LONGEST_LINE) + '"}\n')
    with pytest.raises(ModakError, match="Line 2 has more than 16 MiB"):
        list(read_texts(path, "jsonl", COLUMNS))
    path.write_text('id,ts,body\n1,2,"' + "y" * (2 * CSV_PIECE) + '"\n')
    with pytest.raises(ModakError, match="A row of the CSV body has more than 2 MiB"):
        list(read_texts(path, "csv", COLUMNS))
