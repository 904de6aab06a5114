"""What a reader counts, over every interleaving of its two listings with the steps of a job."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from itertools import combinations_with_replacement

import pytest

from modak.measurements.candidates import Seen
from modak.measurements.manifest import Manifest, ManifestOutput, ManifestStatus
from modak.measurements.visible import Account
from modak.storage.objects import Meta

AT = datetime(2026, 11, 1, tzinfo=UTC)
FOLDER = "db/cpu/2026/11/01/09"
JOB = "20261130t090000000-0123abcd"
INPUTS = tuple(f"{FOLDER}/cpu_20261101_090000_{number}.parquet" for number in range(2))
OUTPUT = f"{FOLDER}/cpu_20261101_090000_000000001_{JOB}-0000_compacted.parquet"
STRAY = OUTPUT.replace("-0000_", "-0001_")
ROWS = {INPUTS[0]: {"a"}, INPUTS[1]: {"b"}, OUTPUT: {"a", "b"}, STRAY: {"a"}}


def seen(path: str, etag: str = "e") -> Seen:
    found = Seen.of(Meta(path, 1, etag, AT))
    assert found is not None
    return found


def manifest(status: ManifestStatus) -> Manifest:
    done = status in (ManifestStatus.COMMITTED, ManifestStatus.CLEANED)
    outputs = (ManifestOutput(OUTPUT, 1),) if done else ()
    return Manifest("db", "cpu", FOLDER, "hourly", JOB, AT, INPUTS, ((1, "e"), (1, "e")), outputs, status)


STEPS: tuple[tuple[tuple[str, ...], ManifestStatus | None], ...] = (
    (INPUTS, None),
    (INPUTS, ManifestStatus.PENDING),
    ((*INPUTS, OUTPUT), ManifestStatus.PENDING),
    ((*INPUTS, OUTPUT, STRAY), ManifestStatus.PENDING),
    ((*INPUTS, OUTPUT, STRAY), ManifestStatus.COMMITTED),
    ((*INPUTS, OUTPUT), ManifestStatus.COMMITTED),
    ((INPUTS[1], OUTPUT), ManifestStatus.COMMITTED),
    ((OUTPUT,), ManifestStatus.COMMITTED),
    ((OUTPUT,), ManifestStatus.CLEANED),
    ((OUTPUT,), None),
)
"""The files and the manifest after every step of a job that goes well."""
GIVEN_UP = (
    *STEPS[:4],
    ((*INPUTS, OUTPUT, STRAY), ManifestStatus.ABORTED),
    (INPUTS, ManifestStatus.ABORTED),
    (INPUTS, None),
)
FIRST_CLEANED, FIRST_DELETE, FORGOTTEN = 8, 6, 9


def counted(
    listing: int, reading: int, steps: tuple[tuple[tuple[str, ...], ManifestStatus | None], ...]
) -> Counter[str]:
    """The rows of a reader that listed files after one step and read manifests after another."""
    status = steps[reading][1]
    account = Account.of([manifest(status)] if status else [])
    visible = account.visible([seen(path) for path in steps[listing][0]], "db/cpu")
    return Counter(row for file in visible for row in ROWS[file.meta.path])


@pytest.mark.parametrize(("listing", "reading"), [*combinations_with_replacement(range(len(STEPS)), 2)])
def test_every_row_is_counted_once_whenever_the_listings_fall(listing: int, reading: int) -> None:
    if listing < 4 and reading >= FIRST_CLEANED:
        pytest.skip("a reader that listed before the commit holds the manifest: leases and the grace period see to it")
    if listing < FIRST_CLEANED and reading == FORGOTTEN:
        pytest.skip("a manifest outlives the last delete by the grace period")
    assert counted(listing, reading, STEPS) == Counter("ab")


@pytest.mark.parametrize(("listing", "reading"), [*combinations_with_replacement(range(len(GIVEN_UP)), 2)])
def test_a_job_that_is_given_up_never_counts(listing: int, reading: int) -> None:
    if 2 <= listing <= 4 and reading == len(GIVEN_UP) - 1:
        pytest.skip("a tombstone stays for a day, longer than any listing takes")
    assert counted(listing, reading, GIVEN_UP) == Counter("ab")


def test_manifests_read_before_files_would_count_rows_twice() -> None:
    twice = [counted(late, early, STEPS) for early, late in combinations_with_replacement(range(len(STEPS)), 2)]
    assert any(found != Counter("ab") for found in twice)


def test_a_file_that_took_the_place_of_an_input_counts_as_itself() -> None:
    account = Account.of([manifest(ManifestStatus.CLEANED)])
    assert not account.counts(seen(INPUTS[0]))
    assert account.counts(seen(INPUTS[0], etag="new"))
    assert account.free(seen(INPUTS[0], etag="new"))


def test_nobody_takes_what_a_job_that_is_not_cleaned_up_speaks_of() -> None:
    for status in (ManifestStatus.PENDING, ManifestStatus.COMMITTED):
        assert not Account.of([manifest(status)]).free(seen(INPUTS[0]))
    assert not Account.of([manifest(ManifestStatus.COMMITTED)]).free(seen(OUTPUT))
    assert Account.of([manifest(ManifestStatus.CLEANED)]).free(seen(OUTPUT))
    assert Account.of([manifest(ManifestStatus.ABORTED)]).free(seen(INPUTS[0]))
