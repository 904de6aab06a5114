"""Stream Load over real HTTP: routes, labels, refusals, and the adoption of staged batches."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import modak
from modak.catalog import operators
from modak.core import faults
from modak.core.errors import ModakError
from modak.runtime.leader import Leader
from modak.runtime.loads import adopt_all
from modak.tables.fold.run import fold
from modak.tables.ingest.plan import SHOWN
from modak.tables.site import Site
from tests.load.conftest import TOKEN, Api, adopted
from tests.tables.events import Events

Row = dict[str, Any]


def _row(key: int, ts: int, body: str = "loaded") -> Row:
    return {"id": key, "ts": ts, "body": body}


def _lines(*rows: Row) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _cold(count: int, start: int = 1000, body: str = "loaded") -> list[Row]:
    return [_row(start + at, at % 100, body) for at in range(count)]


def _staged_files(site: Site) -> list[str]:
    root = site.root_of(site.reader.profile(None).profile_id)
    return [entry.uri for entry in site.store.list(f"{root}/modak-staged")]


def test_hot_and_few_cold_rows_come_in_with_their_label_in_one_transaction(api: Api, events: Events) -> None:
    answer = api.post(_lines(_row(220, 220), _row(5, 5, "five"), _row(9000, 50)), "first")
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "label": "first",
            "state": "committed",
            "hot_rows": 1,
            "delta_rows": 2,
            "spooled_rows": 0,
            "staged_files": 0,
            "rejected_rows": 0,
            "replay": False,
        },
    )
    assert {(220, 220, "loaded"), (5, 5, "five"), (9000, 50, "loaded")} <= events.everything()


def test_a_replayed_label_gives_the_recorded_result_and_changes_nothing(api: Api, events: Events) -> None:
    first = api.post(_lines(_row(220, 220, "one")), "again").json()
    replay = api.post(_lines(_row(220, 220, "two"), _row(221, 221, "two")), "again")
    assert replay.json() == {**first, "replay": True}
    assert (220, 220, "one") in events.everything()


def test_many_cold_rows_are_staged_outside_the_table_and_adopted_with_their_label(
    api: Api, site: Site, leader: Leader, events: Events
) -> None:
    rows = [*_cold(20), _row(5, 5, "five"), _row(230, 230, "hot")]
    answer = api.post(_lines(*rows), "big").json()
    assert (answer["state"], answer["hot_rows"], answer["delta_rows"], answer["spooled_rows"]) == ("staged", 1, 0, 21)
    assert answer["staged_files"] >= 1
    location = site.reader.state(events.name).table.location
    assert _staged_files(site)
    assert not [uri for uri in _staged_files(site) if uri.startswith(location)]
    assert (5, 5, "row 5") in events.cold()
    with site.connect() as conn:
        operators.pause(conn, 1, "me")
    assert adopt_all(site, leader) == 0, "a table that is held back is left alone"
    with site.connect() as conn:
        operators.resume(conn, 1)
    assert adopted(site, leader, events).labels == 1
    assert {(5, 5, "five"), (1000, 0, "loaded"), (230, 230, "hot")} <= events.everything()
    assert api.post(b"", "big").json() == {**answer, "state": "committed", "replay": True}
    adopt_all(site, leader)
    assert _staged_files(site) == []


def test_the_same_key_in_two_staged_labels_is_one_row_and_the_later_wins(
    api: Api, site: Site, leader: Leader, events: Events
) -> None:
    api.post(_lines(*_cold(15, body="first")), "a")
    api.post(_lines(*_cold(15, body="second")), "b")
    api.post(_lines(*_cold(15, start=2000)), "c")
    before = events.snapshots()
    assert adopted(site, leader, events).labels == 3
    assert events.snapshots() == before + 2
    rows = [row for row in events.lake() if 1000 <= row[0] < 2000]
    assert {row[2] for row in rows} == {"second"}
    assert len(rows) == 15


def test_corrections_older_than_a_staged_batch_give_way_and_newer_ones_win(
    api: Api, site: Site, leader: Leader, events: Events
) -> None:
    events.sql('SELECT modak_upsert(\'public.events\', \'{"id": 1001, "ts": 1, "body": "older"}\')')
    api.post(_lines(*_cold(12)), "staged")
    events.sql('SELECT modak_upsert(\'public.events\', \'{"id": 1002, "ts": 2, "body": "newer"}\')')
    assert fold(site, leader.epoch, events.name).blocked == "a staged load waits for its adoption"
    adopted(site, leader, events)
    assert {(1001, 1, "loaded"), (1002, 2, "newer")} <= events.cold()
    assert fold(site, leader.epoch, events.name).changed
    assert {(1001, 1, "loaded"), (1002, 2, "newer")} <= set(events.lake())


@pytest.mark.parametrize(
    ("body", "line", "reason"),
    [
        (b'{"id": 1, "ts": 210}\nnonsense\n', 2, "is not a JSON object"),
        (b'{"id": 1, "ts": 210}\n\n{"id": "x", "ts": 210}\n', 3, "column id: 'x' is no long"),
        (b'{"id": 1, "ts": 210, "colour": "red"}\n', 1, "has unknown columns: colour"),
        (b'{"id": 1, "ts": 900}\n', 1, "no partition takes tier key 900"),
        (b'{"id": 1}\n', 1, "column ts is NULL"),
    ],
)
def test_bad_rows_are_refused_with_their_lines_and_record_nothing(
    api: Api, events: Events, body: bytes, line: int, reason: str
) -> None:
    before = events.everything()
    answer = api.post(body, "bad")
    assert answer.status_code == 400
    assert {"line": line, "reason": reason} in answer.json()["rows"]
    assert events.everything() == before
    assert api.post(_lines(_row(211, 211)), "bad").status_code == 200


def test_max_error_ratio_lets_some_rows_go(api: Api, events: Events) -> None:
    body = _lines(_row(211, 211), _row(212, 212)) + b"nonsense\n"
    assert api.post(body, "some", params={"max_error_ratio": "0.2"}).status_code == 400
    answer = api.post(body, "some", params={"max_error_ratio": "0.5"}).json()
    assert (answer["hot_rows"], answer["rejected_rows"]) == (2, 1)
    assert {(211, 211, "loaded"), (212, 212, "loaded")} <= events.everything()


@pytest.mark.parametrize("where", [210, 10])
def test_a_key_may_come_once_per_batch(api: Api, site: Site, where: int) -> None:
    rows = [_row(1000 + at, where) for at in range(12)]
    answer = api.post(_lines(*rows, rows[0]), "twice")
    assert answer.status_code == 400
    assert answer.json()["rows"] == [{"line": 13, "reason": "its key comes again, first on line 1"}]
    assert _staged_files(site) == []


def test_doors_that_stay_shut(api: Api, site: Site) -> None:
    import httpx

    body = _lines(_row(210, 210))
    assert api.post(body, "x", headers={"X-Modak-Token": "wrong"}).status_code == 401
    assert httpx.post(f"{api.url}/api/load/public.events", content=body).status_code == 401
    assert api.post(body, "x", table="public.nothing").status_code == 404
    assert api.post(body, "x", table="a..b").status_code == 404
    assert httpx.get(f"{api.url}/api/load/public.events").status_code == 405
    assert api.post(body, "x", headers={"Content-Type": "image/png"}).status_code == 415
    assert api.post(body, "x", headers={"Content-Encoding": "br"}).status_code == 415
    assert api.post(b"x" * (2 << 20), "x").status_code == 413
    assert api.post(gzip.compress(b"x" * (2 << 20)), "x", headers={"Content-Encoding": "gzip"}).status_code == 413
    assert api.post(body, "").status_code == 400
    for label, scheme in (("y", "Bearer"), ("z", "bearer")):
        bearer = {"X-Modak-Token": "", "authorization": f"{scheme} {TOKEN}"}
        assert api.post(body, label, headers=bearer).status_code == 200
    assert api.post(body, "x", headers={"X-Modak-Token": "", "Authorization": TOKEN}).status_code == 401


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, api: Api) -> None:
    import hmac

    asked: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(given: bytes, wanted: bytes) -> bool:
        asked.append((given, wanted))
        return real(given, wanted)

    monkeypatch.setattr("modak.runtime.web.load.hmac.compare_digest", compare)
    api.post(b"", "x", headers={"X-Modak-Token": "guess"})
    assert asked == [(b"guess", TOKEN.encode())]


def test_a_label_in_flight_is_409(api: Api, site: Site, events: Events) -> None:
    arrived, go = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "load.before_commit":
            arrived.set()
            go.wait(60)

    faults.watch(hold)
    answers: list[int] = []
    first = threading.Thread(target=lambda: answers.append(api.post(_lines(_row(210, 210)), "busy").status_code))
    first.start()
    assert arrived.wait(60)
    faults.watch(None)
    assert api.post(_lines(_row(210, 210)), "busy").status_code == 409
    go.set()
    first.join(60)
    assert answers == [200]
    assert api.post(b"", "busy").json()["replay"] is True


def test_back_pressure_is_429(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.post(_lines(*_cold(12)), "waits")
    monkeypatch.setattr("modak.tables.load.run.MOST_STAGED", 1)
    answer = api.post(_lines(_row(210, 210)), "next")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")


def test_a_replayed_label_gets_its_result_also_under_back_pressure(
    api: Api, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = api.post(_lines(_row(210, 210, "one")), "done").json()
    staged = api.post(_lines(*_cold(12)), "waits").json()
    monkeypatch.setattr("modak.tables.load.run.MOST_STAGED", 1)
    for first in (committed, staged):
        replay = api.post(_lines(_row(210, 210, "two")), first["label"])
        assert (replay.status_code, replay.json()) == (200, {**first, "replay": True})
    assert api.post(_lines(_row(210, 210, "two")), "next").status_code == 429
    events.sql("UPDATE modak.load_labels SET state = 'failed' WHERE label = 'done'")
    assert api.post(_lines(_row(210, 210, "two")), "done").status_code == 429, "it would bring its rows"
    assert (210, 210, "one") in events.everything()


def test_other_formats_and_encodings_say_the_same(api: Api, events: Events) -> None:
    table = pa.table({"id": [301, 302], "ts": [201, 202], "body": ["x,y", None]})
    parquet, stream, file = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    csv = b'id,ts,body\n301,201,"x,y"\n302,202,\n'
    packed = pa.compress(
        _lines({"id": 301, "ts": 201, "body": "x,y"}, {"id": 302, "ts": 202}), codec="zstd", asbytes=True
    )
    bodies = {
        "csv": (csv, {"Content-Type": "text/csv"}),
        "marked-csv": (codecs.BOM_UTF8 + csv, {"Content-Type": "text/csv"}),
        "parquet": (parquet.getvalue(), {"Content-Type": "application/vnd.apache.parquet"}),
        "arrow": (stream.getvalue(), {"Content-Type": "application/vnd.apache.arrow.stream"}),
        "arrow-file": (file.getvalue(), {"Content-Type": "application/vnd.apache.arrow.file"}),
        "zstd": (packed, {"Content-Encoding": "zstd"}),
        "gzip": (gzip.compress(csv), {"Content-Type": "text/csv", "Content-Encoding": "gzip"}),
    }
    for label, (body, headers) in bodies.items():
        events.sql("DELETE FROM public.events WHERE id > 300")
        answer = api.post(body, label, headers=headers)
        assert (answer.status_code, answer.json().get("hot_rows")) == (200, 2), (label, answer.text)
        assert {row for row in events.heap() if row[0] > 300} == {(301, 201, "x,y"), (302, 202, None)}


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_compressed_body_that_ends_in_the_middle_is_refused_and_records_nothing(
    api: Api, site: Site, events: Events, encoding: str
) -> None:
    rows = _lines(_row(210, 210), *({**row, "body": os.urandom(50).hex()} for row in _cold(200)))
    packed = gzip.compress(rows) if encoding == "gzip" else pa.compress(rows, codec="zstd", asbytes=True)
    before = events.everything()
    for missing in (1, 100, len(packed) // 2):
        answer = api.post(packed[:-missing], "cut", headers={"Content-Encoding": encoding})
        assert (answer.status_code, answer.json()["error"]) == (400, "load.encoding"), missing
    assert events.everything() == before
    assert events.sql("SELECT label FROM modak.load_labels") == []
    assert _staged_files(site) == []
    assert api.post(packed, "cut", headers={"Content-Encoding": encoding}).json()["replay"] is False


def test_defaults_generated_columns_and_checks_hold_for_large_cold_batches(
    api: Api, site: Site, leader: Leader, events: Events
) -> None:
    events.sql("ALTER TABLE public.events ADD COLUMN size int DEFAULT 7, ADD CHECK (body <> 'forbidden')")
    answer = api.post(_lines(*_cold(20)), "defaults").json()
    assert (answer["state"], answer["delta_rows"]) == ("committed", 20)
    images = [image for image in events.delta().values() if image is not None]
    assert {image["size"] for image in images} == {"7"}
    refused = api.post(_lines(*_cold(20, body="forbidden")), "checked")
    assert (refused.status_code, refused.json()["rejected_rows"]) == (400, 20)
    assert refused.json()["rows"][0] == {"line": 1, "reason": "it violates check constraint events_body_check"}


def test_cold_rows_wait_in_memory_only_while_they_are_few_and_may_be_staged(
    api: Api, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.load.cold.KEPT_BYTES", 10_000)
    wide = api.post(_lines(*_cold(3, body="x" * 4_000)), "wide").json()
    assert (wide["state"], wide["spooled_rows"]) == ("staged", 3), "few rows, many bytes"
    events.sql("ALTER TABLE public.events ADD CHECK (body <> 'forbidden')")

    def never(*_: object) -> None:
        raise AssertionError("kept")

    monkeypatch.setattr("modak.tables.load.cold.Cold.take", never)
    assert api.post(_lines(*_cold(20, start=5000)), "checked").json()["delta_rows"] == 20


def test_of_many_bad_rows_the_first_are_shown_and_all_are_counted(api: Api) -> None:
    body = b"nonsense\n" * 500 + _lines(_row(211, 211))
    answer = api.post(body, "many", params={"max_error_ratio": "0.5"})
    assert (answer.status_code, answer.json()["rejected_rows"]) == (400, 500)
    assert [one["line"] for one in answer.json()["rows"]] == list(range(1, SHOWN + 1))
    assert api.post(body, "many", params={"max_error_ratio": "1"}).json()["rejected_rows"] == 500


def test_a_poisoned_label_fails_alone_and_its_files_go_after_the_grace(
    api: Api, site: Site, leader: Leader, events: Events
) -> None:
    api.post(_lines(*_cold(12)), "good")
    api.post(_lines(*_cold(12, start=3000)), "poisoned")
    files = events.sql(
        "SELECT f ->> 'path' FROM modak.load_labels, jsonb_array_elements(files -> 'data') f WHERE label = 'poisoned'"
    )
    Path(files[0][0].removeprefix("file://")).write_bytes(b"damaged")
    done = adopted(site, leader, events)
    assert (done.labels, done.failed) == (1, ("poisoned",))
    assert (1000, 0, "loaded") in set(events.lake())
    adopt_all(site, leader)
    assert _staged_files(site)
    events.sql("UPDATE modak.tables SET maintenance_policy = '{\"orphan_grace_hours\": 0}'")
    adopt_all(site, leader)
    assert _staged_files(site) == []
    assert api.post(_lines(*_cold(12, start=3000)), "poisoned").json()["replay"] is False


@pytest.mark.parametrize(
    "damage",
    [lambda keys: keys[:-1], lambda keys: keys[:-74] + b"\xff" * 64 + keys[-10:]],
    ids=["cut short", "footer overwritten"],
)
def test_a_label_whose_keys_are_damaged_fails_alone(
    api: Api, site: Site, leader: Leader, events: Events, damage: Callable[[bytes], bytes]
) -> None:
    for number, label in enumerate(("good", "poisoned", "later")):
        api.post(_lines(*_cold(12, start=1000 * (number + 1))), label)
    staged = events.sql("SELECT files -> 'keys' ->> 'uri' FROM modak.load_labels WHERE label = 'poisoned'")
    keys = Path(staged[0][0].removeprefix("file://"))
    keys.write_bytes(damage(keys.read_bytes()))
    assert adopt_all(site, leader) == 2
    states = events.sql("SELECT label, state, split_part(error, ':', 1) FROM modak.load_labels ORDER BY label")
    assert states == [("good", "committed", None), ("later", "committed", None), ("poisoned", "failed", "load.damaged")]
    assert {row[0] for row in events.lake() if row[0] >= 1000} == {*range(1000, 1012), *range(3000, 3012)}
    assert all(uri.startswith(f"file://{keys.parent}") for uri in _staged_files(site)), "the others are swept"


def test_the_python_client_sends_rows_and_files_once(api: Api, events: Events, tmp_path: Path) -> None:
    answer = modak.load("public.events", [_row(240, 240)], label="py", url=api.url, token=TOKEN)
    assert (answer["hot_rows"], answer["replay"]) == (1, False)
    assert modak.load("public.events", [_row(240, 240)], label="py", url=api.url, token=TOKEN)["replay"] is True
    path = tmp_path / "rows.csv"
    path.write_text("id,ts,body\n241,241,file\n")
    assert modak.load("public.events", path, url=api.url, token=TOKEN)["hot_rows"] == 1
    with pytest.raises(ModakError, match="line 1: no partition"):
        modak.load("public.events", [_row(1, 9999)], url=api.url, token=TOKEN)
    with pytest.raises(ModakError) as wrong:
        modak.load("public.events", [_row(1, 1)], url=api.url, token="other")
    assert (wrong.value.code, "other" in str(wrong.value)) == ("load.token", False)
