"""Workers that are killed while a mirrored table is anchored: published, compared, converted, or let go."""

from __future__ import annotations

import psycopg
import pytest

from modak.tables.mirror.names import publication_name
from tests.mirror.succession import Act, change, ends_well, heap_of, lead, mirrored, own_slot, slots, succeed
from tests.tables.test_kill import Place, place, until

__all__ = ["change", "mirrored", "place"]

pytestmark = [pytest.mark.timeout(1800), pytest.mark.full]

IDENTITY = ("identity.setting", "identity.set", "mirror.before_guard", "mirror.after_guard")
PUBLICATION = (
    "mirror.before_note",
    "mirror.after_note",
    "slot.evicting",
    "slot.evicted",
    "slot.dropping",
    "slot.dropped",
    "publication.creating",
    "publication.created",
    "mirror.before_mark",
    "mirror.after_mark",
)
ANEW = (
    "slot.creating",
    "slot.created",
    "reanchor.slot_made",
    "mend.before_write",
    "mend.after_write",
    "reanchor.before_commit",
    "mend.before_locate",
    "mend.after_locate",
    "reanchor.committed",
)
REPLACED = ("publication.dropping", "publication.dropped", "publication.creating", "publication.created")
DIFF = ("mirror.before_leaves", "mirror.after_leaves", "diff.before_commit", "diff.committed")
ALTERED = ("mirror.before_altered", "mirror.after_altered")
RESUMED = ("copy.before_heal", "copy.after_heal")
TO_MIRRORED = ("convert.before_switch", "convert.after_switch")
TO_TIERED = ("convert.before_empty", "convert.after_empty")
FAREWELL = (
    "slot.evicting",
    "slot.evicted",
    "slot.dropping",
    "slot.dropped",
    "publication.dropping",
    "publication.dropped",
    "mirror.before_unguard",
    "mirror.after_unguard",
    "mirror.before_restore",
    "mirror.after_restore",
)
KILLED = (
    *IDENTITY,
    *PUBLICATION,
    *ANEW,
    *REPLACED,
    *DIFF,
    *ALTERED,
    "copy.committed",
    *RESUMED,
    *TO_MIRRORED,
    *TO_TIERED,
    "unregister.committed",
    *FAREWELL,
)
"""Every point at which a process dies here."""


def test_after_a_kill_while_replica_identity_is_set_it_is_set_by_the_next(mirrored: Place, change: Act) -> None:
    def spoil() -> None:
        mirrored.truth.sql("ALTER TABLE public.events_0 REPLICA IDENTITY DEFAULT")
        mirrored.truth.sql('DROP TRIGGER IF EXISTS "!modak_truncate" ON public.events_0')
        change()

    succeed(mirrored, IDENTITY, spoil, change)
    assert mirrored.truth.sql("SELECT relreplident::text FROM pg_class WHERE relname = 'events_0'") == [("f",)]
    guards = "SELECT count(*) FROM pg_trigger WHERE tgname = '!modak_truncate' AND tgrelid = 'events_0'::regclass"
    assert mirrored.truth.sql(guards) == [(1,)]


def test_after_a_kill_while_a_lost_publication_is_made_again_nothing_is_missed(mirrored: Place, change: Act) -> None:
    def lose() -> None:
        mirrored.truth.sql(f"DROP PUBLICATION {publication(mirrored)}")
        change()

    succeed(mirrored, PUBLICATION, lose, change)


def test_after_a_kill_while_a_table_is_anchored_anew_it_is_anchored_again(mirrored: Place, change: Act) -> None:
    def lose() -> None:
        lose_slot(mirrored)
        change()

    succeed(mirrored, ANEW, lose, change)


def test_after_a_kill_while_a_publication_gets_its_table_again_nothing_is_missed(mirrored: Place, change: Act) -> None:
    mirrored.truth.sql("CREATE TABLE public.other (id bigint PRIMARY KEY)")

    def lose() -> None:
        mirrored.truth.sql(f"ALTER PUBLICATION {publication(mirrored)} SET TABLE public.other")
        change()

    succeed(mirrored, REPLACED, lose, change)


def test_after_a_kill_while_a_leaf_is_compared_the_next_worker_compares_it(mirrored: Place, change: Act) -> None:
    def swap() -> None:
        """Rows of a leaf come and go while it is no part of the table."""
        for statement in (
            "ALTER TABLE public.events DETACH PARTITION public.events_100",
            "DELETE FROM public.events_100 WHERE id % 7 = 0",
            "UPDATE public.events_100 SET body = 'apart' WHERE id % 7 = 1",
            "ALTER TABLE public.events ATTACH PARTITION public.events_100 FOR VALUES FROM (100) TO (200)",
        ):
            mirrored.truth.sql(statement)
        change()

    succeed(mirrored, DIFF, swap, change)
    assert mirrored.truth.sql("SELECT count(*) FROM modak.mirror_diffs") == [(0,)]


def test_after_a_kill_while_a_column_that_was_written_anew_is_noted_it_is_compared(
    mirrored: Place, change: Act
) -> None:
    def alter() -> None:
        mirrored.truth.sql("ALTER TABLE public.events ALTER body TYPE text USING body || '.'")
        change()

    succeed(mirrored, ALTERED, alter, change)


def test_after_a_kill_while_a_copy_is_taken_up_it_is_taken_up_again(place: Place, change: Act) -> None:
    place.environ["MODAK_MIRROR_FLUSH_MILLIS"] = "100"
    for point in ("copy.committed", *RESUMED):
        place.start("mirror", "--kill", point).dies()
        change()
    assert place.start("mirror").ends() == 0
    ends_well(place)


def test_after_a_kill_in_a_conversion_the_same_command_ends_it(place: Place, change: Act) -> None:
    place.environ["MODAK_MIRROR_FLUSH_MILLIS"] = "100"
    assert place.start("keep").ends() == 0
    tier(place)
    change()
    for point in TO_MIRRORED:
        place.start("to-mirrored", "--kill", point).dies()
        change()
    assert place.start("to-mirrored").ends() == 0
    change()
    ends_well(place)
    for point in TO_TIERED:
        place.start("to-tiered", "--kill", point).dies()
        change()
    tier(place)
    state = place.truth.state
    assert (state.table.mode, state.table.keep_heap) == ("tiered", True)
    assert slots(place) == []
    assert place.truth.reader.unfinished_ops() == ()
    assert place.truth.everything() == set(heap_of(place))


def test_after_kills_in_the_farewell_the_next_start_leaves_nothing(place: Place) -> None:
    assert place.start("mirror").ends() == 0
    place.start("unregister", "--kill", "unregister.committed").dies()
    for point in FAREWELL:
        place.start("repair", "--kill", point).dies()
    assert place.start("repair").ends() == 0
    place.truth.check_gone()
    assert slots(place) == []
    assert place.truth.sql("SELECT pubname FROM pg_publication") == []
    identities = "SELECT DISTINCT relreplident::text FROM pg_class WHERE relname ~ '^events(_[0-9]+)?$'"
    assert place.truth.sql(identities) == [("d",)]


def tier(place: Place) -> None:
    worker = lead(place)
    until(lambda: place.truth.state.cutline.t == 200 and not place.truth.state.unfinished, "it is not tiered", [worker])
    worker.terminate()


def publication(place: Place) -> str:
    return publication_name(place.truth.state.table.table_id)


def lose_slot(place: Place) -> None:
    """Drop the slot in a moment at which nobody reads from it."""

    def dropped() -> bool:
        try:
            place.truth.sql(f"SELECT pg_drop_replication_slot('{own_slot(place)}')")
        except psycopg.errors.ObjectInUse:
            return False
        return True

    until(dropped, "somebody holds the slot for ever")
