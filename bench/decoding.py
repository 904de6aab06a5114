"""How fast changes come out of Postgres: mixed changes that lie in the WAL already, as typed Arrow columns.

Six of ten changes are inserts, three updates, one a delete, in transactions of a thousand rows; the table writes whole
old rows. Ours reads both images of every change, all columns, by peeking (`ours`) and by streaming (`stream`). The
limit is the server's decoding to nowhere: the same changes counted inside it. `fetch` takes the undecoded messages
through ADBC and drops them. Nothing is confirmed, so every run reads the same WAL, first cold, then warm.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.contest import contest, rates
from bench.report import Line, Report

ROWS = 500_000
NAME = "bench"
STEP = 1_000

_TABLE = """
CREATE TABLE public.followed (
    id bigint PRIMARY KEY, occurred_at bigint NOT NULL, user_id int, kind text, amount numeric(12,2), ok bool,
    created timestamptz
)
"""
_INSERT = """
INSERT INTO public.followed
SELECT i, i, i * 7919 %% 100000, 'kind ' || i %% 10, (i %% 1000000)::numeric / 100, i %% 3 = 0,
       timestamptz '2026-01-01' + i * interval '1 second'
FROM generate_series(%s::bigint, %s::bigint - 1) AS i
"""
_UPDATE = "UPDATE public.followed SET amount = amount + 1, kind = 'changed' WHERE id >= %s AND id < %s"
_DELETE = "DELETE FROM public.followed WHERE id >= %s AND id < %s"
_MESSAGES = (
    f"pg_logical_slot_peek_binary_changes('{NAME}', NULL, NULL, 'proto_version', '1', 'publication_names', '{NAME}',"
    " 'binary', 'true')"
)


def main(options: list[str]) -> None:
    """Write the changes once, let every contestant read them, publish."""
    contest("decoding", options, ROWS, CONTESTANTS, _fill, _publish)


def _publish(found: dict[str, dict[str, dict[str, float]]], rows: int) -> None:
    lines = [
        Line(f"{name} ({heat})", run["rate"], run.get("per_cpu_second"), run.get("peak_rss_mb"))
        for name, runs in found.items()
        for heat, run in runs.items()
    ]
    ours = found["ours"]["warm"]
    Report(
        bench="decoding",
        ours=ours["rate"],
        rivals={name: found[name]["warm"]["rate"] for name in ("fetch", "stream")},
        limit=found["limit"]["warm"]["rate"],
        peak_rss_mb=ours["peak_rss_mb"],
        per_cpu_second=ours["per_cpu_second"],
        lines=lines,
        more={"changes": rows, "cold": {name: round(runs["cold"]["rate"]) for name, runs in found.items()}},
    ).publish()


def _fill(dsn, rows: int) -> None:
    from modak.core.names import TableName
    from modak.postgres.changes.publication import create_publication, write_full_rows
    from modak.postgres.changes.slot import created_slot
    from modak.postgres.connect import connect

    name = TableName("public", "followed")
    inserts, updates, deletes = rows * 6 // 10, rows * 3 // 10, rows // 10
    with connect(dsn, autocommit=True) as conn:
        conn.execute(_TABLE)
        assert create_publication(conn, NAME, [name])
        assert write_full_rows(conn, name) == ()
        with created_slot(dsn, NAME):
            pass
        for statement, count in ((_INSERT, inserts), (_UPDATE, updates), (_DELETE, deletes)):
            for low in range(0, count, STEP):
                conn.execute(statement, (low, min(low + STEP, count)))
        conn.execute("CHECKPOINT")


def limit(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """The changes decoded and counted inside the server."""
    from modak.postgres.connect import connect

    def run() -> None:
        with connect(_dsn(home), autocommit=True) as conn:
            (count,) = conn.execute(f"SELECT count(*) FROM {_MESSAGES}").fetchone() or (0,)
            assert count > rows

    return rates(run, rows)


def fetch(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """The messages through ADBC, undecoded and dropped."""
    from modak.postgres.arrow import stream

    def run() -> None:
        count = sum(batch.num_rows for batch in stream(_dsn(home), f"SELECT data FROM {_MESSAGES}"))
        assert count > rows

    return rates(run, rows)


def ours(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Peeked and decoded, every column of both images."""
    from modak.postgres.changes.peek import Peek

    def run() -> None:
        _read(Peek(_feed(home), _types(home), _flushed(home), most=2 * rows), rows)

    return rates(run, rows)


def stream(home: Path, rows: int) -> dict[str, dict[str, float]]:
    """Streamed and decoded, every column of both images."""
    from modak.postgres.changes.stream import ReplicationStream

    def run() -> None:
        upto = _flushed(home)
        with ReplicationStream(_feed(home), _types(home), home / "spool") as open_stream:
            _read(open_stream.read(upto, 120.0), rows)

    return rates(run, rows)


def _read(pieces, rows: int) -> None:
    read = 0
    for piece in pieces:
        for item in piece.items:
            for image in (item.new, item.old):
                if image is not None:
                    assert image.batch().num_rows == len(item)
            read += len(item)
    assert read == rows, (read, rows)


def _dsn(home: Path):
    from modak.postgres.embedded import EmbeddedServer

    return EmbeddedServer(home).dsn("modak")


def _feed(home: Path):
    from modak.postgres.changes.peek import Feed

    return Feed(_dsn(home), NAME, (NAME,))


def _types(home: Path):
    from modak.postgres.changes.lookup import CatalogTypes
    from modak.postgres.connect import connect

    return CatalogTypes(lambda: connect(_dsn(home), autocommit=True))


def _flushed(home: Path) -> int:
    from modak.postgres.changes.slot import evict, usable_slot
    from modak.postgres.connect import connect

    with connect(_dsn(home), autocommit=True) as conn:
        # The stream of the run before holds the slot for another moment.
        evict(conn, NAME)
        return usable_slot(conn, NAME).flush_lsn


CONTESTANTS = {"limit": limit, "fetch": fetch, "ours": ours, "stream": stream}

if __name__ == "__main__":
    main(sys.argv[1:])
