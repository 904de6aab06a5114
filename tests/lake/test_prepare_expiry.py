"""Expiry names the files to delete before the swap and deletes nothing itself; the traps around it are recreated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modak.core.errors import Conflict, Refused
from modak.lake.changes import Append, CreateTag, DeleteRange, ExpireSnapshots, RemoveTag, RowDelta, SetProperties
from modak.lake.iceberg import reaching
from modak.lake.model import LakeName, Prepared, Vector, data_folder, pin_tag
from modak.storage import Store, local_path, normal
from tests.lake.iceberg_support import Lab, exists, only, rows, table_folder


@pytest.fixture
def name(lab: Lab) -> LakeName:
    """Three snapshots: two appends, then the first file deleted."""
    made = lab.create()
    lab.commit(made, Append(lab.write(made, rows(1, 2))))
    lab.commit(made, Append(lab.write(made, rows(150))))
    lab.commit(made, DeleteRange("at", None, 100))
    return made


def _delete_freed(lab: Lab, name: LakeName, prepared: Prepared) -> list[str]:
    """Delete what a landed expiry has freed; the data and delete files among it."""
    assert prepared.expired_from is not None
    freed = lab.lake.freed(name, prepared.expired_from)
    files = list(freed.files())
    assert Store.of(lab.lake.warehouse).delete([*files, *freed.metadata]) == len(files) + len(freed.metadata)
    return files


def test_an_expiry_deletes_nothing_and_tells_afterwards_what_it_has_made_unreachable(lab: Lab, name: LakeName) -> None:
    old = lab.ids(name)[:2]
    before = table_folder(lab, name)
    prepared = lab.lake.prepare(name, lab.op(), 1, [ExpireSnapshots(tuple(old))])
    assert before <= table_folder(lab, name)
    assert lab.ids(name)[:2] == old
    assert prepared.expired_from == lab.table(name).metadata_location
    assert lab.lake.freed(name, prepared.expired_from).metadata == (), "nothing has expired yet"
    assert lab.publish(prepared)
    assert {*lab.lake.freed(name, prepared.expired_from).metadata} <= before
    (file,) = _delete_freed(lab, name, prepared)
    assert file.endswith(".parquet")
    assert file in before
    assert lab.ids(name) == [prepared.snapshot_id]
    assert lab.pyiceberg(name) == lab.duckdb(name) == rows(150)


def test_a_tagged_snapshot_is_not_expired_and_its_files_are_not_listed(lab: Lab, name: LakeName) -> None:
    first, second, _ = lab.ids(name)
    lab.commit(name, CreateTag(pin_tag(first), first))
    with pytest.raises(Conflict):
        lab.lake.prepare(name, lab.op(), 1, [ExpireSnapshots((first,))])
    prepared = lab.commit(name, ExpireSnapshots((second,)))
    assert _delete_freed(lab, name, prepared) == []
    assert lab.pyiceberg(name, first) == rows(1, 2)


def test_a_tag_may_go_in_the_commit_that_expires_its_snapshot(lab: Lab, name: LakeName) -> None:
    first, second, last = lab.ids(name)
    lab.commit(name, CreateTag(pin_tag(first), first))
    prepared = lab.commit(name, RemoveTag(pin_tag(first)), ExpireSnapshots((first, second)))
    assert len(_delete_freed(lab, name, prepared)) == 1
    assert lab.ids(name) == [last]
    assert lab.table(name).tags == {}


def test_a_pin_tag_outlives_a_tables_own_rule_on_the_age_of_tags(lab: Lab, name: LakeName) -> None:
    first, second, last = lab.ids(name)
    lab.commit(name, SetProperties({"history.expire.max-ref-age-ms": "1"}), tag=[first])
    lab.commit(name, ExpireSnapshots((second,)))
    assert lab.table(name).tags == {pin_tag(first): first}
    assert lab.ids(name) == [first, last]


def test_a_file_that_somebody_has_added_again_since_is_not_among_the_freed(lab: Lab, name: LakeName) -> None:
    first, second, _ = lab.ids(name)
    (file,) = [found.file for found in lab.lake.files(name, first)]
    prepared = lab.commit(name, ExpireSnapshots((first, second)))
    lab.commit(name, Append((file,)))
    assert _delete_freed(lab, name, prepared) == []
    assert lab.pyiceberg(name) == lab.duckdb(name) == rows(1, 2, 150)


def test_what_another_tool_has_deleted_of_expired_snapshots_is_passed_over(lab: Lab, name: LakeName) -> None:
    first, second, _ = lab.ids(name)
    before = lab.table(name).metadata_location
    prepared = lab.commit(name, ExpireSnapshots((first,)))
    lab.commit(name, ExpireSnapshots((second,)))
    freed = lab.lake.freed(name, before)
    wanted, store = set(freed.files()), Store.of(lab.lake.warehouse)
    assert len(wanted) == 1
    for gone in [uri for uri in freed.metadata if "snap-" not in uri]:
        store.delete([gone])
    assert list(freed.files()) == [], "nobody can say any more what they held"
    assert lab.lake.freed(name, before).metadata == freed.metadata
    store.delete(freed.metadata)
    again = lab.lake.freed(name, str(prepared.expired_from))
    assert list(again.files()) == []
    assert {uri for uri in again.metadata if "snap-" not in uri} == set()
    assert lab.pyiceberg(name) == rows(150)


def test_no_more_manifest_lists_are_read_than_it_takes_to_know_that_nothing_is_freed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lab.create()
    for number in range(6):
        lab.commit(made, Append(lab.write(made, rows(number))))
    prepared = lab.commit(made, ExpireSnapshots(tuple(lab.ids(made)[:2])))
    read, manifests = list[int](), reaching._manifests

    def counted(java: Any, snapshots: Any, io: Any) -> Any:
        some = snapshots.toList()
        read.append(some.size())
        return manifests(java, some.stream(), io)

    monkeypatch.setattr(reaching, "_manifests", counted)
    for name, value in (("LISTS_AT_ONCE", 1), ("READERS", 1)):
        monkeypatch.setattr(reaching, name, value)
    freed = lab.lake.freed(made, str(prepared.expired_from))
    assert [uri for uri in freed.metadata if "snap-" not in uri] == []
    assert list(freed.files()) == []
    assert sum(read) == 3, "of the two that are gone, and of the oldest that stays"


def test_files_of_a_layout_that_another_tool_has_cleaned_away_are_found(lab: Lab, name: LakeName) -> None:
    lab.java_table(name).updateSpec().removeField("at_trunc").commit()
    lab.commit(name, DeleteRange("at", None, None))
    lab.foreign(name, ())
    prepared = lab.commit(name, ExpireSnapshots(tuple(lab.ids(name)[:-1])))
    lab.java_table(name).expireSnapshots().expireOlderThan(0).cleanExpiredMetadata(True).commit()
    assert len(lab.metadata(name)["partition-specs"]) == 1
    assert len(_delete_freed(lab, name, prepared)) == 2


def test_statistics_of_expired_snapshots_are_freed_and_those_of_others_stay(lab: Lab, name: LakeName) -> None:
    first, _, last = lab.ids(name)
    places = {each: f"{lab.table(name).location}/metadata/{each}.stats" for each in (first, last)}
    for each, place in places.items():
        Path(local_path(place) or "").write_bytes(b"how many there are")
        blobs = lab.java.jvm.java.util.ArrayList()
        about = lab.java.iceberg.GenericStatisticsFile(each, place, 18, 1, blobs)
        lab.java_table(name).updateStatistics().setStatistics(about).commit()
    prepared = lab.commit(name, ExpireSnapshots((first,)))
    freed = lab.lake.freed(name, str(prepared.expired_from)).metadata
    assert normal(places[first]) in freed
    assert normal(places[last]) not in freed


def test_a_metadata_file_of_another_table_frees_nothing(lab: Lab, name: LakeName) -> None:
    prepared = lab.commit(lab.create(), Append(lab.write(name, rows(1))))
    with pytest.raises(Refused) as refused:
        lab.lake.freed(name, prepared.new_location)
    assert refused.value.code == "lake.another_table"


def test_rows_and_expiry_are_never_one_commit(lab: Lab, name: LakeName) -> None:
    with pytest.raises(ValueError, match="of their own"):
        lab.lake.prepare(name, lab.op(), 1, [Append(lab.write(name, rows(5))), ExpireSnapshots((1,))])


def test_trap_an_expiry_without_a_word_on_files_deletes_them_in_the_uncommitted_transaction(
    lab: Lab, name: LakeName
) -> None:
    first, second, _ = lab.ids(name)
    victim = lab.lake.files(name, first)
    path = next(iter(victim)).file.path
    transaction = lab.java_table(name).newTransaction()
    transaction.expireSnapshots().expireOlderThan(0).expireSnapshotId(first).expireSnapshotId(second).commit()
    assert not exists(path), "gone, although nothing was committed"
    assert first in lab.ids(name)


def test_trap_an_id_without_a_cut_off_expires_others_by_age(lab: Lab, name: LakeName) -> None:
    first, second, last = lab.ids(name)
    lab.commit(name, SetProperties({"history.expire.max-snapshot-age-ms": "1"}))
    transaction = lab.java_table(name).newTransaction()
    transaction.expireSnapshots().cleanExpiredFiles(False).expireSnapshotId(first).commit()
    assert transaction.currentMetadata().snapshots().size() == 1, "the second went too"
    lab.commit(name, ExpireSnapshots((first,)))
    assert lab.ids(name) == [second, last]


def test_trap_incremental_clean_up_names_a_puffin_file_that_a_live_vector_shares(lab: Lab) -> None:
    name = lab.create()
    lab.commit(name, Append(lab.write(name, rows(1, 2, 150, 160))))
    low, high = sorted(only(lab, name), key=lambda file: file.lower or 0)
    shared = _in_one_file(lab, name, lab.vector(name, [0], low.file), lab.vector(name, [0], high.file))
    lab.commit(name, RowDelta(vectors=shared, validate_from=lab.ids(name)[-1]))
    replaced = lab.vector(name, [0, 1], low.file)
    lab.commit(name, RowDelta(vectors=(replaced,), removed_vectors=shared[:1], validate_from=lab.ids(name)[-1]))
    lab.commit(name, Append(lab.write(name, rows(300))))
    past = lab.ids(name)[:3]

    named = lab.java.jvm.java.util.stream.Stream.builder()
    transaction = lab.java_table(name).newTransaction()
    transaction.expireSnapshots().expireOlderThan(2**62).retainLast(1).deleteWith(named).commit()
    assert normal(shared[1].path) in map(normal, lab.java.texts(named.build().toList()))

    prepared = lab.commit(name, ExpireSnapshots(tuple(past)))
    assert normal(shared[1].path) not in _delete_freed(lab, name, prepared)
    assert lab.pyiceberg(name) == rows(160, 300)


def _in_one_file(lab: Lab, name: LakeName, *vectors: Vector) -> tuple[Vector, ...]:
    """Several vectors behind each other in one file; readers find them by offset, so only the first footer is odd."""
    uri = f"{data_folder(lab.table(name).location, lab.op())}/shared.puffin"
    blob = b""
    entries: list[dict[str, Any]] = []
    for vector in vectors:
        path = local_path(vector.path)
        assert path is not None
        entry = json.loads(vector.json)
        entry["content-offset"] += len(blob)
        entry["file-path"] = uri
        entries.append(entry)
        blob += Path(path).read_bytes()
    target = local_path(uri)
    assert target is not None
    Path(target).parent.mkdir(parents=True)
    Path(target).write_bytes(blob)
    return tuple(
        Vector(json.dumps(entry | {"file-size-in-bytes": len(blob)}), vector.rows, len(blob), uri, vector.data_file)
        for entry, vector in zip(entries, vectors, strict=True)
    )
