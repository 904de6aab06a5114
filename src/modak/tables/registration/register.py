"""Registration: preflight, the lake table, and everything the catalog holds about the table, in one transaction.

Re-running the same registration is a no-op. A different one is refused by the names of the settings that differ; the
layout of an existing lake table is never touched.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import structlog

from modak.catalog import spill
from modak.catalog.journal import Journal
from modak.catalog.records import Cutline, LakeColumns, NewPartition, Profile, TableConfig, TableRecord
from modak.catalog.write import CatalogWriter
from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import OpId, new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.model import LakeName, LakeTable, Prepared, attempt_folder
from modak.postgres.describe import PgTable, describe
from modak.storage.uri import normal
from modak.tables.columns import column_property, lake_columns
from modak.tables.mirror.leaves import as_partitions, bounded_leaves
from modak.tables.mirror.preflight import MODE, PLAIN_MIRROR, RETAINING_MIRROR, inspect_mirror, look
from modak.tables.observe import holds_rows, new_partition
from modak.tables.registration.preflight import Preflight, Shape, bounded, inspect, open_below
from modak.tables.registration.request import CHUNK_ROWS, RegisterRequest, check_flags, length
from modak.tables.retention.plan import RETENTION_LINE
from modak.tables.site import Site
from modak.tables.tidy import discard_attempt, finish_purges, is_busy, open_spill

log = structlog.get_logger()

FIRST_FLOOR = "modak.first-floor"
"""Table property: where the cut-line of the first registration began; older rows were never in the lake."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The outcome of a registration."""

    table: TableName
    created: bool
    preflight: Preflight
    cut_line: str
    width: str
    location: str
    transparent_writes: bool
    rows_copied: int | None = None
    """Mirrored: rows that this run has brought into the lake."""
    mode: str = "tiered"


def preflight(site: Site, request: RegisterRequest) -> Preflight:
    """Look at everything that registration would look at; changes nothing."""
    check_flags(request)
    known = site.reader.table(request.table)
    heap, _, found, _ = _inspect(site, request, known)
    if known is not None:
        _refuse_differences(site, known, request, heap)
    return found


def register(site: Site, request: RegisterRequest) -> Registered:
    """Bring a table into the house, or find it there already as asked."""
    check_flags(request)
    known = site.reader.table(request.table)
    heap, existing, found, shape = _inspect(site, request, known)
    if known is not None:
        _refuse_differences(site, known, request, heap)
        if known.mode == "mirrored":
            return _anchored(site, known, found, created=False)
        open_spill(site, site.writer(None), request.table)
        return _registered(site, known, found, created=False)
    found.refuse_if_wrong(request.table)
    assert shape is not None
    _create(site, request, heap, existing, shape)
    record = site.reader.table(request.table)
    assert record is not None
    cut_line = None if shape.cut_line is None else shape.axis.literal(shape.cut_line)
    log.info("register.done", table=str(request.table), cut_line=cut_line, location=record.location)
    if record.mode == "mirrored":
        return _anchored(site, record, found, created=True)
    return _registered(site, record, found, created=True)


def _anchored(site: Site, record: TableRecord, found: Preflight, *, created: bool) -> Registered:
    """A mirrored table is not taken in before its rows are in the lake; running it again goes on with that."""
    from modak.tables.mirror.anchor import anchor

    if site.reader.state(record.name).cutline.t is not None:
        open_spill(site, site.writer(None), record.name)
    rows = anchor(site, record.name)
    done = _registered(site, record, found, created=created)
    return replace(done, rows_copied=rows)


def _inspect(
    site: Site, request: RegisterRequest, known: TableRecord | None
) -> tuple[PgTable, LakeTable | None, Preflight, Shape | None]:
    with site.connect(autocommit=True) as conn:
        heap = describe(conn, request.table, request.tier_key)
        default_rows = any(holds_rows(conn, leaf) for leaf in heap.leaves if leaf.is_default)
        low_rows = [leaf.name for leaf in open_below(heap) if known is None and holds_rows(conn, leaf)]
        server = look(conn, heap) if request.mode == "mirrored" else None
    existing = None if known is not None else _lake_table(site, request)
    if server is not None:
        found, shape = inspect_mirror(heap, request, existing, default_rows, server)
    else:
        found, shape = inspect(heap, request, existing, default_rows, low_rows)
    return heap, existing, replace(found, registered=known is not None), shape


def _lake_table(site: Site, request: RegisterRequest) -> LakeTable | None:
    """The lake table of that name, if one was left behind; asking Postgres first spares most registrations the JVM."""
    name = lake_name(site, request)
    with site.connect(autocommit=True) as conn:
        row = conn.execute(
            "SELECT 1 FROM modak_iceberg.iceberg_tables WHERE table_namespace = %s AND table_name = %s",
            (name.namespace_text, name.name),
        ).fetchone()
    return site.lake.load(name) if row else None


def lake_name(site: Site, request: RegisterRequest) -> LakeName:
    """Where the table is found in the lake: `<namespace>.<schema>.<table>`."""
    return LakeName((site.settings.lake.namespace, request.table.schema), request.table.name)


def _create(site: Site, request: RegisterRequest, heap: PgTable, existing: LakeTable | None, shape: Shape) -> None:
    writer, op_id = site.writer(None), new_op_id(site.clock)
    config = _config(site, request, heap, shape, existing)
    folder = attempt_folder(config.location, op_id, 1)
    Journal(writer).begin(op_id, None, "register", {"table": str(request.table), "location": config.location}, [folder])
    try:
        finish_purges(site, writer, config.location)
        # Before the attempt writes anything, or a crash would leave a file that the journal does not know of.
        Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.PREPARED, attempt=1)
        prepared = None if existing else _prepare(site, config, heap, shape, op_id)
        line = _first_line(shape, prepared, existing)
        with writer.transaction(op_id) as tx:
            if prepared is not None:
                tx.publish(prepared)
            tx.register(config, line, _partitions(site, request, heap), _columns(heap, existing))
        reach("register.committed")
    except ModakError as error:
        _give_up(site, writer, config.location, op_id, error)
        raise
    if shape.cut_line is None or not is_busy(open_spill(site, site.writer(None), request.table)):
        Journal(writer).finish(op_id)


def _columns(heap: PgTable, existing: LakeTable | None) -> LakeColumns:
    if existing is None:
        return lake_columns(column_property(heap), [column.name for column in heap.columns], heap.oid)
    return lake_columns(existing.properties, [column.name for column in existing.schema], heap.oid)


def _partitions(site: Site, request: RegisterRequest, heap: PgTable) -> list[NewPartition]:
    if request.mode == "tiered":
        return [new_partition(leaf) for leaf in bounded(heap)]
    with site.connect(autocommit=True) as conn:
        leaves = as_partitions(bounded_leaves(conn, heap), heap)
    aging = {leaf.oid for leaf in bounded(heap)}
    return leaves if request.heap_retention is None else [leaf for leaf in leaves if leaf.leaf_oid in aging]


def _prepare(site: Site, config: TableConfig, heap: PgTable, shape: Shape, op_id: OpId) -> Prepared:
    properties = {**site.settings.lake.props, **column_property(heap)}
    if shape.cut_line is not None:
        properties[FIRST_FLOOR] = str(shape.cut_line)
    if config.mode == "mirrored":
        properties[MODE] = PLAIN_MIRROR if config.heap_retention is None else RETAINING_MIRROR
    wanted = {key: value for key, value in properties.items() if not key.startswith(("iceberg.catalog.", "hadoop."))}
    reach("register.before_prepare")
    columns = [mapped.column for mapped in shape.columns]
    prepared = site.lake.prepare_create(
        config.lake, columns, shape.layout, wanted, op_id, attempt=1, location=config.location
    )
    reach("register.prepared")
    return prepared


def _config(
    site: Site, request: RegisterRequest, heap: PgTable, shape: Shape, existing: LakeTable | None
) -> TableConfig:
    numbers = {column.name: column.attnum for column in heap.columns}
    name = lake_name(site, request)
    profile = _profile(site, request, existing)
    return TableConfig(
        name=request.table,
        relid=heap.oid,
        mode="mirrored" if request.mode == "mirrored" else "tiered",
        pk_columns=request.pk,
        pk_attnums=tuple(numbers[column] for column in request.pk),
        tier_key=request.tier_key,
        tier_attnum=numbers[request.tier_key],
        axis=shape.axis,
        width=shape.width,
        profile_id=profile.profile_id,
        lake=name,
        location=existing.location if existing else site.lake.location(name, site.root_of(profile.profile_id)),
        layout=asdict(existing.layout if existing else shape.layout),
        keep_heap=request.keep_heap,
        heap_retention=length(request.heap_retention, shape.axis, "--heap-retention"),
        lake_retention=length(request.lake_retention, shape.axis, "--lake-retention"),
        chunk_rows=(request.chunk_rows or CHUNK_ROWS) if request.mode == "mirrored" else None,
        numeric_as=request.numeric_as,
    )


def _profile(site: Site, request: RegisterRequest, existing: LakeTable | None) -> Profile:
    """The profile that is asked for; a lake table that was left behind stays on the one that it lies on."""
    asked = site.reader.profile(request.profile)
    if existing is None:
        return asked
    roots = {profile.profile_id: site.keys[profile.profile_id] for profile in site.reader.profiles()}
    if roots[asked.profile_id].holds(normal(existing.location)):
        return asked
    fitting = [one for one in site.reader.profiles() if roots[one.profile_id].holds(normal(existing.location))]
    if request.profile is not None or not fitting:
        raise Refused(
            "register.elsewhere",
            f"The lake table of {request.table} lies in {existing.location}, not on profile {asked.name}.",
            hint=f"Register it with --profile {fitting[0].name}." if fitting else "Create a profile for that place.",
        )
    return max(fitting, key=lambda one: len(roots[one.profile_id].root))


def _first_line(shape: Shape, prepared: Prepared | None, existing: LakeTable | None) -> Cutline:
    if existing is not None:
        # History reaches as far back as it did before, although its partitions have left the heap long ago.
        taken = Cutline(
            table_id=0,
            t=None,
            snapshot_id=existing.snapshot_id,
            metadata_location=existing.metadata_location,
        )
        if shape.cut_line is None:
            return taken
        floor = int(existing.properties.get(FIRST_FLOOR, shape.cut_line))
        expired = existing.properties.get(RETENTION_LINE)
        return replace(
            taken,
            t=shape.cut_line,
            # What has expired stays so, except where the heap has partitions again.
            retention_line=None if expired is None else min(int(expired), shape.cut_line),
            first_floor=min(floor, shape.cut_line),
        )
    assert prepared is not None
    return Cutline(table_id=0, t=shape.cut_line, snapshot_id=None, metadata_location=prepared.new_location)


def _give_up(site: Site, writer: CatalogWriter, location: str, op_id: OpId, error: ModakError) -> None:
    """Remove what was written, unless it has landed after all; if that fails, the next start of a worker does it."""
    try:
        op = site.reader.op(op_id)
        if op is None or Journal(writer).landed(op_id):
            return
        discard_attempt(site, location, op_id, 1)
        Journal(writer).fail(op_id, op.phase, error)
    except ModakError as another:
        log.warning("register.cleanup_deferred", op=op_id, because=another.code)


def _refuse_differences(site: Site, known: TableRecord, request: RegisterRequest, heap: PgTable) -> None:
    profile = next(one.name for one in site.reader.profiles() if one.profile_id == known.profile_id)

    def asked(flag: str, text: str | None) -> str | None:
        units = length(text, known.axis, flag)
        return None if units is None else known.axis.length(units)

    def kept(units: int | None) -> str | None:
        return None if units is None else known.axis.length(units)

    pairs = {
        "--pk": (",".join(known.pk_columns), ",".join(request.pk)),
        "--tier-key": (known.tier_key, request.tier_key),
        "--mode": (known.mode, request.mode),
        "--profile": (profile, request.profile or profile),
        "--keep-heap": (_switch(known.keep_heap), _switch(request.keep_heap)),
        "--lake-retention": (kept(known.lake_retention), asked("--lake-retention", request.lake_retention)),
        "--heap-retention": (kept(known.heap_retention), asked("--heap-retention", request.heap_retention)),
        "--numeric-as": (known.numeric_as, request.numeric_as),
    }
    if request.mode == "mirrored":
        pairs["--chunk-rows"] = (str(known.chunk_rows), str(request.chunk_rows or CHUNK_ROWS))
    if request.partition_width is not None:
        width = "0" if known.width is None else _width(known)
        pairs["--partition-width"] = (width, asked("--partition-width", request.partition_width))
    differing = [f"{flag} is {old or 'none'}, not {new or 'none'}" for flag, (old, new) in pairs.items() if old != new]
    if differing:
        raise Refused(
            "register.differs",
            f"{request.table} is registered already, but differently: {'; '.join(differing)}.",
            hint="Nothing was changed. Unregister it first to register it anew; the lake table stays.",
        )
    if known.relid != heap.oid:
        raise Refused(
            "register.another_table",
            f"{request.table} is not the table that was registered: it was dropped and created again.",
            hint="Unregister it first; the lake table stays.",
        )


def _registered(site: Site, record: TableRecord, found: Preflight, *, created: bool) -> Registered:
    with site.connect(autocommit=True) as conn:
        transparent = spill.find(conn, record.table_id) is not None or spill.diverts(conn, record.table_id)
    line = site.reader.cutline(record.table_id)
    cut_line = "" if line is None or line.t is None else record.axis.literal(line.t)
    width = _width(record)
    return Registered(record.name, created, found, cut_line, width, record.location, transparent, mode=record.mode)


def _switch(on: bool) -> str:
    return "on" if on else "off"


def _width(record: TableRecord) -> str:
    width = record.width
    if width is None:
        return "unpartitioned"
    return str(width) if width.months else record.axis.length(width.amount)
