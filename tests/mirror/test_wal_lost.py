"""A slot that the server itself invalidates, because it keeps more WAL than `max_slot_wal_keep_size` allows.

On a server of its own: the limit holds for every slot of a server, and those of other tests live on the shared one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.postgres.embedded import EmbeddedServer
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.site import Site
from tests.mirror.pumping import Mirrored
from tests.tables.conftest import settings_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture
def apart(warehouse: str, spark_home: Path, gateway: object) -> Iterator[Site]:
    """A site on a server that nobody else uses."""
    home = Path(tempfile.mkdtemp(prefix="modak-test-wal-"))
    home.chmod(0o711)
    server = EmbeddedServer(home, extra_options={"fsync": "off"})
    try:
        server.start()
        with open_site(settings_for(server.dsn(), warehouse, spark_home)) as opened:
            yield opened
    finally:
        server.destroy()
        shutil.rmtree(home, ignore_errors=True)


def test_a_slot_that_the_server_has_invalidated_is_made_good_by_a_comparison(apart: Site) -> None:
    with Leader.campaign(apart, 5) as leader:
        table = Mirrored.create(apart, leader.epoch, rows="SELECT i, i, 'row ' || i FROM generate_series(1, 100) AS i")
        table.sql("UPDATE @ SET body = 'seen' WHERE id < 10")
        table.pump()
        table.close()
        table.sql("UPDATE @ SET body = 'unseen' WHERE id < 20", "DELETE FROM @ WHERE id = 50")
        _invalidate(table)
        table.sql("INSERT INTO @ VALUES (500, 1, 'after it was lost')")
        assert table.pump().reanchored
        assert table.is_same()
        assert _wal_status(table) == "reserved"
        table.sql("UPDATE @ SET body = 'followed' WHERE id = 3")
        assert not table.pump().reanchored
        assert table.is_same()
        table.close()


def _invalidate(table: Mirrored) -> None:
    """Let the WAL go beyond the limit until a checkpoint takes it from the slot; then there is no limit again."""
    table.sql("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'", "SELECT pg_reload_conf()")
    for _ in range(20):
        table.sql(
            "SELECT count(pg_logical_emit_message(false, 'test', repeat('x', 1 << 20))) FROM generate_series(1, 4)",
            "SELECT pg_switch_wal()",
            "CHECKPOINT",
        )
        if _wal_status(table) == "lost":
            break
    table.sql("ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")
    assert _wal_status(table) == "lost"


def _wal_status(table: Mirrored) -> str:
    ((status,),) = table.sql("SELECT wal_status FROM pg_replication_slots")
    return str(status)
