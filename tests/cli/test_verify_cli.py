"""`modak-worker verify` as a user types it: what it prints, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from modak import config
from modak.core.axis import Axis
from modak.core.errors import UsageError
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.tiering.run import tier
from modak.tables.verify.since import since_key
from tests.tables.events import Events


@pytest.mark.spark
@pytest.mark.usefixtures("reset_logs", "spark")
def test_verify_tells_what_differs_repairs_it_and_ends_with_the_right_code(
    modak: Callable[..., Result], fresh_database: Dsn, warehouse: str, spark_home: Path
) -> None:
    environ = {
        "MODAK_PG_URL": fresh_database.uri(),
        "MODAK_WAREHOUSE": warehouse,
        "MODAK_HOME": str(spark_home),
        "MODAK_RECLAIM_LAG": str(2**62),
        "MODAK_PREMAKE_PARTITIONS": "0",
    }
    with open_site(config.load(environ)) as site, Leader.campaign(site, 5) as leader:
        _ = site.spark
        events = Events.create(site)
        events.register()
        events.tier(leader)

    equal = modak("verify", "--table", "events", **environ)
    assert equal.exit_code == 0, equal.output
    assert "equal public.events: 200 rows compared" in equal.stdout
    assert "verify.progress" in equal.stderr

    with connect(fresh_database) as conn:
        conn.execute('ALTER TABLE public.events_0 DISABLE TRIGGER "!modak_capture"')
        conn.execute("UPDATE public.events_0 SET body = 'unseen' WHERE id = 7")
        conn.execute('ALTER TABLE public.events_0 ENABLE ALWAYS TRIGGER "!modak_capture"')
    different = modak("verify", "--table", "events", "--json", **environ)
    assert different.exit_code == 1
    found = json.loads(different.stdout)
    seen = {"column": "body", "heap": "unseen", "lake": "row 7", "copies": 1}
    assert found["differences"] == [{"kind": "changed", "key": "7", "tier_key": "7", **seen}]
    assert (found["sound"], found["differing_rows"], found["after_repair"]) == (False, 1, None)

    repaired = modak("verify", "--table", "events", "--repair", **environ)
    assert repaired.exit_code == 0, repaired.output
    assert "1 row written through the delta; verified again:" in repaired.stdout
    assert "equal public.events" in repaired.stdout

    without_heap = {**environ, "MODAK_RECLAIM_LAG": "0"}
    with open_site(config.load(without_heap)) as site, Leader.campaign(site, 5) as leader:
        _ = site.spark
        tier(site, leader.epoch, events.name)
    sound = modak("verify", "--table", "events", **without_heap)
    assert sound.exit_code == 0, sound.output
    assert "sound public.events: 200 rows that only the lake has checked for keys, lines and files" in sound.stdout


@pytest.mark.parametrize("share", ["0", "1.5", "-1", "half"])
def test_a_sample_is_a_share(modak: Callable[..., Result], share: str) -> None:
    result = modak("verify", "--table", "t", "--sample", share)
    assert result.exit_code == 2
    assert "--sample" in result.stderr


def test_a_tier_key_is_written_as_its_column_is() -> None:
    assert since_key(Axis.INTEGER, "-5") == -5
    assert since_key(Axis.DATE, "1970-01-03") == 2
    assert since_key(Axis.TIMESTAMPTZ, "1970-01-01T01:00:00+01:00") == 0
    assert since_key(Axis.TIMESTAMP, "1970-01-02") == 86_400_000_000
    for axis, text in ((Axis.INTEGER, "2024-01-01"), (Axis.DATE, "5"), (Axis.TIMESTAMP, "soon")):
        with pytest.raises(UsageError, match="--since"):
            since_key(axis, text)
