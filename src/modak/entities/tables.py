"""The three tables in Postgres: making them, describing and checking those that are there, and watching every write.

`install` may be run again at any time. The triggers put every changed row into the dirty slot of the change log, in the
writer's own transaction, and refuse TRUNCATE, which would change rows unseen. A store without them is never flushed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import psycopg
import structlog
from psycopg import sql

from modak.core.errors import Refused, UsageError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.entities.config import CDCConfig
from modak.entities.registry import SLOTS
from modak.postgres.connect import translate

log = structlog.get_logger()

_SLOT_TYPES = {
    "text": "text",
    "smallint": "smallint",
    "integer": "integer",
    "bigint": "bigint",
    "double": "double precision",
    "uuid": "uuid",
}
_SLOT_COLUMNS = {
    f"{family}_{number:02d}": _SLOT_TYPES[family] for family, count in SLOTS.items() for number in range(1, count + 1)
}
_MAIN_COLUMNS = {
    "ltbase_schema_id": "smallint",
    "ltbase_row_id": "uuid",
    **_SLOT_COLUMNS,
    "ltbase_created_at": "bigint",
    "ltbase_updated_at": "bigint",
    "ltbase_deleted_at": "bigint",
}
_EAV_COLUMNS = {
    "schema_id": "smallint",
    "row_id": "uuid",
    "attr_id": "smallint",
    "array_indices": "text",
    "value_text": "text",
    "value_numeric": "numeric",
}
_LOG_COLUMNS = {
    "schema_id": "smallint",
    "row_id": "uuid",
    "flushed_at": "bigint",
    "changed_at": "bigint",
    "deleted_at": "bigint",
}
_KEYS: Mapping[str, tuple[str, ...]] = {
    "main": ("ltbase_schema_id", "ltbase_row_id"),
    "eav": ("schema_id", "row_id", "attr_id", "array_indices"),
    "log": ("schema_id", "row_id", "flushed_at"),
}
_WANTED = {"main": _MAIN_COLUMNS, "eav": _EAV_COLUMNS, "log": _LOG_COLUMNS}
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "main": ("ltbase_created_at", "ltbase_updated_at"),
    "eav": (),
    "log": ("changed_at",),
}
"""Columns in which a NULL would stop every flush; those of the primary keys have none anyway."""
_OPTIONAL: Mapping[str, tuple[str, ...]] = {"main": ("ltbase_deleted_at",), "eav": (), "log": ("deleted_at",)}
"""Columns in which NULL means that the row is live."""
_NO_TRUNCATE = {"modak_entities_truncate": "no_truncate"}
_WRITES = ("modak_entities_insert", "modak_entities_update", "modak_entities_delete")
_TRIGGERS: Mapping[str, Mapping[str, str]] = {
    "main": {**dict.fromkeys(_WRITES, "mark_main"), "modak_entities_applied": "mark_applied", **_NO_TRUNCATE},
    "eav": {**dict.fromkeys(_WRITES, "mark_eav"), "modak_entities_applied": "mark_applied", **_NO_TRUNCATE},
    "log": _NO_TRUNCATE,
}
"""What watches each table and which function it calls; the log itself only refuses TRUNCATE."""
_FUNCTIONS = ("mark_main", "mark_eav", "mark_applied", "no_truncate")

_DESCRIBE = """
SELECT c.oid::int8, c.relkind, n.nspname, c.relname,
       ARRAY(SELECT a.attname::text FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k(attnum, at)
             JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
             WHERE i.indrelid = c.oid AND i.indisprimary ORDER BY k.at),
       (SELECT json_object_agg(attname, json_build_array(
                   CASE WHEN atttypid = 'numeric'::regtype THEN 'numeric' ELSE format_type(atttypid, atttypmod) END,
                   attnotnull OR typnotnull, atthasdef OR attidentity <> '' OR typdefault IS NOT NULL) ORDER BY attnum)
        FROM pg_attribute JOIN pg_type t ON t.oid = atttypid
        WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped),
       (SELECT json_object_agg(tgname, json_build_array(
                   tgfoid::int8, format('%%s.%%I', pronamespace::regnamespace, proname), tgenabled = 'A'))
        FROM pg_trigger JOIN pg_proc p ON p.oid = tgfoid WHERE tgrelid = c.oid AND NOT tgisinternal)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""
# A slot that is there becomes another version, so that whoever exported the row before does not mark it clean.
_DIRTY_ALL = """
INSERT INTO {log} AS l (schema_id, row_id, flushed_at, changed_at)
SELECT schema_id, row_id, 0, (extract(epoch FROM clock_timestamp()) * 1000)::bigint FROM (
    SELECT ltbase_schema_id, ltbase_row_id FROM {main} UNION SELECT schema_id, row_id FROM {log}
) AS known (schema_id, row_id) ORDER BY 1, 2
ON CONFLICT (schema_id, row_id, flushed_at) DO UPDATE SET changed_at = l.changed_at
"""
_UNSEEN = """
SELECT EXISTS (SELECT FROM {main} m WHERE m.ltbase_schema_id = %s AND m.ltbase_deleted_at IS NULL AND NOT EXISTS (
    SELECT FROM {log} c WHERE c.schema_id = m.ltbase_schema_id AND c.row_id = m.ltbase_row_id))
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column as Postgres has it."""

    type: str
    required: bool
    """It takes no NULL."""
    filled: bool
    """It has a value also where a writer names none."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """A trigger as Postgres has it."""

    function: int
    calls: str
    always: bool


@dataclass(frozen=True, slots=True)
class Described:
    """A table as Postgres has it."""

    oid: int
    name: TableName
    kind: str
    columns: Mapping[str, Column]
    key: tuple[str, ...]
    triggers: Mapping[str, Trigger]


@dataclass(frozen=True, slots=True)
class EntityTables:
    """The names of the tables of a store."""

    main: TableName
    eav: TableName
    log: TableName

    @classmethod
    def of(cls, config: CDCConfig) -> EntityTables:
        """The tables that a configuration names."""
        names = (config.entity_main_table, config.eav_data_table, config.change_log_table)
        for name in names:
            if "%" in name:
                # The driver would take it for a parameter.
                raise UsageError("entities.table_name", f"The table name {name!r} has a % in it.", hint="Rename it.")
        return cls(*map(TableName.parse, names))

    @property
    def quarantine(self) -> TableName:
        """Where rows wait whose values do not fit."""
        return TableName(self.log.schema, f"{self.log.name}_quarantine")

    def function(self, does: str) -> TableName:
        """The function that does one of our things for this change log."""
        return TableName(self.log.schema, f"{self.log.name}_{does}")

    def named(self) -> tuple[tuple[str, TableName], ...]:
        """The three tables by what they are."""
        return (("main", self.main), ("eav", self.eav), ("log", self.log))


@dataclass(frozen=True, slots=True)
class Installed:
    """The tables of a store, checked."""

    tables: EntityTables
    main: Described
    eav: Described
    log: Described
    dirtied: int = 0
    """Rows that `install` made dirty, because nobody had watched for a while."""

    @property
    def leaves(self) -> tuple[tuple[int, TableName], ...]:
        """What an export holds under lock."""
        return tuple((each.oid, each.name) for each in (self.main, self.eav, self.log))


def identifier(table: TableName) -> sql.Identifier:
    """The quoted name of a table."""
    return sql.Identifier(table.schema, table.name)


def install(conn: psycopg.Connection[Any], tables: EntityTables) -> Installed:
    """Make what is missing: tables, index, triggers; in one transaction. Tables that are there are checked first.

    Where triggers have been away from a store that had them, every row of it becomes dirty: nobody knows what changed.
    """
    try:
        reach("install.before")
        with conn.transaction():
            found = _described(conn, tables)
            _refuse([problem for kind, each in found.items() for problem in _problems(kind, each)])
            ours = _functions(conn, tables)
            _refuse_foreign(found, ours)
            known = _was_installed(conn, tables, found)
            gap = known and any(not _is_watched(kind, found.get(kind), ours) for kind, _ in tables.named())
            conn.execute(_script(tables, "tables.sql"))
            conn.execute(_script(tables, "triggers.sql"))
            # Making a trigger waits for the writers of a table and keeps others out until we have committed.
            dirtied = conn.execute(_of(tables, _DIRTY_ALL)).rowcount if gap else 0
        reach("install.after")
        if gap:
            log.warning("entities.unwatched", table=str(tables.main), dirtied=dirtied)
        return replace(check(conn, tables), dirtied=dirtied)
    except psycopg.Error as error:
        raise translate(error) from error


def check(conn: psycopg.Connection[Any], tables: EntityTables) -> Installed:
    """Describe the tables of a store; refuse with everything that is wrong, and the command that puts it right."""
    try:
        found = _described(conn, tables)
        ours = _functions(conn, tables)
        waiting = describe(conn, tables.quarantine)
    except psycopg.Error as error:
        raise translate(error) from error
    missing = [name for kind, name in tables.named() if kind not in found]
    if missing:
        raise no_tables(*missing)
    _refuse([problem for kind, each in found.items() for problem in _problems(kind, each)])
    _refuse_foreign(found, ours)
    unwatched = [str(each.name) for kind, each in found.items() if not _is_watched(kind, each, ours)]
    if unwatched or waiting is None:
        what = f"Writes to {' and '.join(unwatched)} are not watched" if unwatched else "The quarantine is missing"
        raise Refused(
            "entities.unwatched",
            f"{what}, so changes would be lost.",
            hint="Install the triggers with: modak-worker entities install",
        )
    return Installed(tables, found["main"], found["eav"], found["log"])


def no_tables(*missing: TableName) -> Refused:
    """A store lacks tables, or its settings name others."""
    return Refused(
        "entities.no_tables",
        f"There is no table {' and no table '.join(map(str, missing))}.",
        hint="Make the tables of an entity store with: modak-worker entities install",
    )


def unseen(conn: psycopg.Connection[Any], tables: EntityTables, schema_id: int) -> bool:
    """Whether live rows of a schema were written before anybody watched; only an init exports them."""
    row = conn.execute(_of(tables, _UNSEEN), (schema_id,)).fetchone()
    return row is not None and bool(row[0])


def describe(conn: psycopg.Connection[Any], name: TableName) -> Described | None:
    """A table as it is, `None` where there is none."""
    row = conn.execute(_DESCRIBE, (identifier(name).as_string(conn),)).fetchone()
    if row is None:
        return None
    oid, kind, schema, table, key, columns, triggers = row
    return Described(
        oid,
        TableName(schema, table),
        kind if isinstance(kind, str) else kind.decode(),
        {column: Column(*of) for column, of in (columns or {}).items()},
        tuple(key),
        {trigger: Trigger(*of) for trigger, of in (triggers or {}).items()},
    )


def _described(conn: psycopg.Connection[Any], tables: EntityTables) -> dict[str, Described]:
    found = ((kind, describe(conn, name)) for kind, name in tables.named())
    return {kind: each for kind, each in found if each is not None}


def _functions(conn: psycopg.Connection[Any], tables: EntityTables) -> dict[str, int | None]:
    """The functions of this change log by what they do, `None` where there is none."""
    names = [f"{identifier(tables.function(does)).as_string(conn)}()" for does in _FUNCTIONS]
    found = conn.execute("SELECT to_regprocedure(name)::oid::int8 FROM unnest(%s::text[]) AS name", (names,))
    return {does: row[0] for does, row in zip(_FUNCTIONS, found.fetchall(), strict=True)}


def _is_watched(kind: str, found: Described | None, ours: Mapping[str, int | None]) -> bool:
    for name, does in _TRIGGERS[kind].items():
        trigger = None if found is None else found.triggers.get(name)
        if trigger is None or not trigger.always or trigger.function != ours[does]:
            return False
    return True


def _was_installed(conn: psycopg.Connection[Any], tables: EntityTables, found: Mapping[str, Described]) -> bool:
    """Whether rows may be in files already: a store was installed here, or there is a log of changes."""
    if describe(conn, tables.quarantine) is not None:
        return True
    row = conn.execute(_of(tables, "SELECT EXISTS (SELECT FROM {log})")).fetchone() if "log" in found else None
    return row is not None and bool(row[0])


def _refuse_foreign(found: Mapping[str, Described], ours: Mapping[str, int | None]) -> None:
    """Two change logs cannot watch the same tables: the second would silently take the first one's changes."""
    foreign = [
        (each.name, trigger.calls)
        for kind, each in found.items()
        for name, does in _TRIGGERS[kind].items()
        if (trigger := each.triggers.get(name)) is not None and trigger.function != ours[does]
    ]
    if foreign:
        named = " and ".join(dict.fromkeys(str(name) for name, _ in foreign))
        functions = [f"{calls}()" for calls in dict.fromkeys(calls for _, calls in foreign)]
        raise Refused(
            "entities.foreign_triggers",
            f"Writes to {named} are watched for another change log, by {functions[0]}.",
            hint="Name that log in MODAK_ENTITIES_CHANGE_LOG_TABLE. If its store is given up: "
            f"DROP FUNCTION {', '.join(functions)} CASCADE, then modak-worker entities install",
        )


def _problems(kind: str, found: Described) -> Iterator[str]:
    if found.kind != "r":
        yield f"{found.name} is not an ordinary table"
    for name, wanted in _WANTED[kind].items():
        column = found.columns.get(name)
        if column is None:
            yield f"{found.name} has no column {name}"
        elif column.type != wanted and not (wanted == "text" and column.type.startswith("character varying")):
            yield f"{found.name}.{name} is {column.type}, not {wanted}"
        elif name in _REQUIRED[kind] and not column.required:
            yield f"{found.name}.{name} takes NULL, which no flush could export (SET NOT NULL)"
        elif name in _OPTIONAL[kind] and column.required:
            yield f"{found.name}.{name} takes no NULL, so no row could be live (DROP NOT NULL)"
    if found.key != _KEYS[kind]:
        yield f"the primary key of {found.name} is not ({', '.join(_KEYS[kind])})"
    if kind == "log":
        for name, column in found.columns.items():
            if name not in _LOG_COLUMNS and column.required and not column.filled:
                yield f"every write would fail for want of {found.name}.{name} (SET DEFAULT, or DROP NOT NULL)"


def _refuse(problems: Iterator[str] | Sequence[str]) -> None:
    listed = list(problems)
    if listed:
        raise Refused(
            "entities.other_tables",
            "The tables are not those of an entity store: " + "; ".join(listed) + ".",
            hint="Alter them, or name others in MODAK_ENTITIES_ENTITY_MAIN_TABLE, _EAV_DATA_TABLE and "
            "_CHANGE_LOG_TABLE.",
        )


def _of(tables: EntityTables, text: str) -> sql.Composed:
    template: Any = text
    return sql.SQL(template).format(main=identifier(tables.main), log=identifier(tables.log))


def _script(tables: EntityTables, name: str) -> sql.Composed:
    text: Any = files("modak.entities").joinpath(name).read_text(encoding="utf-8")
    slots = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(kind)) for column, kind in _SLOT_COLUMNS.items()
    )
    return sql.SQL(text).format(
        main=identifier(tables.main),
        eav=identifier(tables.eav),
        log=identifier(tables.log),
        quarantine=identifier(tables.quarantine),
        index=sql.Identifier(f"{tables.log.name}_dirty"),
        slots=slots,
        **{does: identifier(tables.function(does)) for does in _FUNCTIONS},
    )
