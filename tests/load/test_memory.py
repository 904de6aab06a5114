"""Large bodies in little memory: a worker in a process of its own, of which the body may take 200 MB."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.spark.texts import PIECE, Format, TextColumn, read_texts
from tests.load.conftest import TOKEN
from tests.runtime.group import Member
from tests.tables.conftest import settings_for
from tests.tables.events import Events

ROWS = 1_150_000
TEXT = "X" * 900
COLUMNS = [TextColumn("id"), TextColumn("ts"), TextColumn("body")]
TYPES: dict[Format, str] = {
    "jsonl": "application/x-ndjson",
    "csv": "text/csv",
    "parquet": "application/vnd.apache.parquet",
    "arrow": "application/vnd.apache.arrow.stream",
}


def _written(path: Path, form: Format, rows: int, *, start: int = 10_000_000, low: int = 0) -> Path:
    """Rows of about 930 bytes with tier keys from `low` on; Parquet as one row group, Arrow as one batch."""
    if form in ("jsonl", "csv"):
        with path.open("w") as file:
            if form == "csv":
                file.write("id,ts,body\n")
            for at in range(rows):
                key, ts = start + at, low + at % 50
                file.write(
                    f'{{"id": {key}, "ts": {ts}, "body": "{TEXT}"}}\n' if form == "jsonl" else f"{key},{ts},{TEXT}\n"
                )
        return path
    table = pa.table(
        {"id": range(start, start + rows), "ts": [low + at % 50 for at in range(rows)], "body": [TEXT] * rows}
    )
    if form == "parquet":
        pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=rows)
        return path
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=rows)
    return path


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "arrow"])
def test_rows_are_taken_apart_by_pieces_however_the_sender_has_grouped_them(form: Format, tmp_path: Path) -> None:
    rows = 150_000
    body = _written(tmp_path / "body", form, rows)
    gc.collect()
    before, seen = pa.total_allocated_bytes(), 0
    for texts in read_texts(body, form, COLUMNS):
        seen += len(texts.rows)
        assert texts.rows.nbytes <= 3 * PIECE
        # A reader of CSV reads ahead; the body has seventy pieces.
        assert pa.total_allocated_bytes() - before < (45 if form == "csv" else 8) * PIECE
    assert seen == rows


class _Peak:
    """The most memory that a process has while this is open."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self.before = self.most = self._process.memory_info().rss

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.most = max(self.most, self._process.memory_info().rss)

    def __enter__(self) -> _Peak:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()


@pytest.fixture
def member(fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: object, tmp_path: Path) -> Iterator[Member]:
    """A whole worker with a tiered table: 0 to 199 are in the lake, 200 to 299 in the heap."""
    environ = {
        "MODAK_PG_URL": fresh_database.safe(),
        "MODAK_PG_PASSWORD": fresh_database.password,
        "MODAK_WAREHOUSE": warehouse,
        "MODAK_HOME": str(spark_home),
        "MODAK_PREMAKE_PARTITIONS": "0",
        "MODAK_TIERING_LAG": "100000",
        "MODAK_LOAD_TOKEN": TOKEN,
    }
    with open_site(settings_for(fresh_database, warehouse, spark_home)) as site:
        events = Events.create(site)
        events.register()
        with Leader.campaign(site, 30) as leader:
            events.tier(leader)
    started = Member(environ, tmp_path / "member.log")
    until = time.monotonic() + 120
    while started.get("/readyz")[0] != 200:
        assert time.monotonic() < until, started.log.read_text()[-2000:]
        time.sleep(0.2)
    yield started
    started.kill()


def _sent(member: Member, label: str, form: Format, body: Path) -> dict[str, object]:
    headers = {"X-Modak-Token": TOKEN, "X-Modak-Label": label, "Content-Type": TYPES[form]}
    with body.open("rb") as file:
        answer = httpx.post(
            f"http://127.0.0.1:{member.port}/api/load/public.events",
            content=iter(lambda: file.read(1 << 20), b""),
            headers=headers,
            timeout=1500,
        )
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def _adopted(member: Member, label: str, body: Path) -> None:
    until = time.monotonic() + 600
    while _sent(member, label, "jsonl", body)["state"] != "committed":
        assert time.monotonic() < until, member.log.read_text()[-2000:]
        time.sleep(0.5)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("form", "low"), [("jsonl", 0), ("csv", 0), ("parquet", 0), ("arrow", 0), ("jsonl", 200)], ids=str
)
def test_a_gigabyte_goes_through_two_hundred_megabytes(member: Member, form: Format, low: int, tmp_path: Path) -> None:
    body = _written(tmp_path / "body", form, ROWS, low=low)
    small = _written(tmp_path / "small", form, 2_000, start=5_000_000, low=low)
    nothing = tmp_path / "nothing"
    nothing.touch()
    _sent(member, "warm", form, small)
    _adopted(member, "warm", nothing)
    with _Peak(member.process.pid) as peak:
        result = _sent(member, "big", form, body)
        _adopted(member, "big", nothing)
    assert result["hot_rows" if low else "spooled_rows"] == ROWS
    assert peak.most - peak.before < 200 << 20, (peak.most - peak.before) >> 20
