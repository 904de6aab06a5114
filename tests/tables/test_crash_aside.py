"""Crashes at points that lie beside the usual life of a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.lake.iceberg.vectors import read_vector, vector_uri, write_vector
from modak.lake.model import DataFile
from modak.storage.store import Store
from modak.tables.registration.unregister import unregister
from modak.tables.site import Site
from tests.tables.events import Events


@pytest.mark.parametrize("point", ["spill.before_forget", "spill.after_forget"])
def test_a_table_that_was_dropped_behind_our_back_leaves_at_the_second_try(
    site: Site, events: Events, point: str
) -> None:
    events.register()
    events.sql("DROP TABLE public.events")
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        unregister(site, events.name, drop_lake=True)
    faults.arm(None)
    unregister(site, events.name, drop_lake=True)
    assert site.reader.tables() == []
    assert site.reader.unfinished_ops() == ()
    assert not events.sql("SELECT relname FROM pg_class WHERE relname LIKE 'shadow%'")
    assert list(site.store.list()) == []


@pytest.mark.parametrize("point", ["vectors.before_write", "vectors.durable"])
def test_a_vector_cut_short_lies_in_its_operations_folder_and_is_written_again(tmp_path: Path, point: str) -> None:
    folder = f"file://{tmp_path}/warehouse/data/op-1"
    file = DataFile('{"spec-id": 0, "partition": {}}', 10, 1, f"{folder}/rows.parquet")
    store = Store.of(f"file://{tmp_path}/warehouse", {})
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        write_vector(vector_uri(folder, "00000"), [1, 3], file)
    faults.arm(None)
    written = write_vector(vector_uri(folder, "00000"), [1, 3], file)
    assert list(read_vector(written)) == [1, 3]
    assert store.delete_prefix(folder) == (2 if point == "vectors.durable" else 1)
    assert list(store.list()) == []
