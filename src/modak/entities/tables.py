"""The three tables in Postgres: making them, describing and checking those that are there, and watching every write.

`install` may be run again at any time. The triggers put every changed row into the dirty slot of the change log, in the
writer's own transaction, and refuse TRUNCATE, which would change rows unseen. A store without them is never flushed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import psycopg
from psycopg import sql

from modak.core.errors import Refused, UsageError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.entities.config import CDCConfig
from modak.entities.registry import SLOTS
from modak.postgres.connect import translate

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
_NO_TRUNCATE = ("modak_entities_truncate",)
TRIGGERS = (
    "modak_entities_insert",
    "modak_entities_update",
    "modak_entities_delete",
    "modak_entities_applied",
    *_NO_TRUNCATE,
)
"""What watches a data table; the log itself only refuses TRUNCATE."""

_DESCRIBE = """
SELECT c.oid::int8, c.relkind, n.nspname, c.relname,
       ARRAY(SELECT attname::text FROM pg_attribute a WHERE a.attrelid = c.oid AND attnum > 0 AND NOT attisdropped
             ORDER BY attnum),
       ARRAY(SELECT CASE WHEN atttypid = 'numeric'::regtype THEN 'numeric' ELSE format_type(atttypid, atttypmod) END
             FROM pg_attribute a WHERE a.attrelid = c.oid AND attnum > 0 AND NOT attisdropped ORDER BY attnum),
       ARRAY(SELECT a.attname::text FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k(attnum, at)
             JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
             WHERE i.indrelid = c.oid AND i.indisprimary ORDER BY k.at),
       ARRAY(SELECT tgname::text FROM pg_trigger t
             WHERE t.tgrelid = c.oid AND NOT tgisinternal AND tgenabled = 'A')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""


@dataclass(frozen=True, slots=True)
class Described:
    """A table as Postgres has it."""

    oid: int
    name: TableName
    kind: str
    columns: Mapping[str, str]
    key: tuple[str, ...]
    watched: frozenset[str]
    """Its triggers that fire always."""


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

    @property
    def leaves(self) -> tuple[tuple[int, TableName], ...]:
        """What an export holds under lock."""
        return tuple((each.oid, each.name) for each in (self.main, self.eav, self.log))


def identifier(table: TableName) -> sql.Identifier:
    """The quoted name of a table."""
    return sql.Identifier(table.schema, table.name)


def install(conn: psycopg.Connection[Any], tables: EntityTables) -> Installed:
    """Make what is missing: tables, index, triggers; in one transaction. Tables that are there are checked first."""
    try:
        reach("install.before")
        with conn.transaction():
            for kind, name in tables.named():
                found = describe(conn, name)
                if found is not None:
                    _refuse(_problems(kind, found))
            conn.execute(_script(tables, "tables.sql"))
            conn.execute(_script(tables, "triggers.sql"))
        reach("install.after")
        return check(conn, tables)
    except psycopg.Error as error:
        raise translate(error) from error


def check(conn: psycopg.Connection[Any], tables: EntityTables) -> Installed:
    """Describe the tables of a store; refuse with everything that is wrong, and the command that puts it right."""
    try:
        found = {kind: describe(conn, name) for kind, name in tables.named()}
        waiting = describe(conn, tables.quarantine)
    except psycopg.Error as error:
        raise translate(error) from error
    missing = [name for kind, name in tables.named() if found[kind] is None]
    if missing:
        raise no_tables(*missing)
    there = {kind: each for kind, each in found.items() if each is not None}
    _refuse([problem for kind, each in there.items() for problem in _problems(kind, each)])
    unwatched = [str(each.name) for kind, each in there.items() if not set(_triggers_of(kind)) <= each.watched]
    if unwatched or waiting is None:
        what = f"Writes to {' and '.join(unwatched)} are not watched" if unwatched else "The quarantine is missing"
        raise Refused(
            "entities.unwatched",
            f"{what}, so changes would be lost.",
            hint="Install the triggers with: modak-worker entities install",
        )
    return Installed(tables, there["main"], there["eav"], there["log"])


def no_tables(*missing: TableName) -> Refused:
    """A store lacks tables, or its settings name others."""
    return Refused(
        "entities.no_tables",
        f"There is no table {' and no table '.join(map(str, missing))}.",
        hint="Make the tables of an entity store with: modak-worker entities install",
    )


def unseen(conn: psycopg.Connection[Any], tables: EntityTables) -> bool:
    """Whether there are rows that were written before anybody watched; only an init exports them."""
    query = sql.SQL(
        "SELECT EXISTS (SELECT FROM {} m WHERE NOT EXISTS (SELECT FROM {} c"
        " WHERE c.schema_id = m.ltbase_schema_id AND c.row_id = m.ltbase_row_id) LIMIT 1)"
    ).format(identifier(tables.main), identifier(tables.log))
    row = conn.execute(query).fetchone()
    return row is not None and bool(row[0])


def describe(conn: psycopg.Connection[Any], name: TableName) -> Described | None:
    """A table as it is, `None` where there is none."""
    row = conn.execute(_DESCRIBE, (identifier(name).as_string(conn),)).fetchone()
    if row is None:
        return None
    oid, kind, schema, table, columns, types, key, watched = row
    return Described(
        oid,
        TableName(schema, table),
        kind if isinstance(kind, str) else kind.decode(),
        dict(zip(columns, types, strict=True)),
        tuple(key),
        frozenset(watched),
    )


def _problems(kind: str, found: Described) -> Iterator[str]:
    if found.kind != "r":
        yield f"{found.name} is not an ordinary table"
    for column, wanted in _WANTED[kind].items():
        has = found.columns.get(column)
        if has is None:
            yield f"{found.name} has no column {column}"
        elif has != wanted and not (wanted == "text" and has.startswith("character varying")):
            yield f"{found.name}.{column} is {has}, not {wanted}"
    if found.key != _KEYS[kind]:
        yield f"the primary key of {found.name} is not ({', '.join(_KEYS[kind])})"


def _refuse(problems: Iterator[str] | Sequence[str]) -> None:
    listed = list(problems)
    if listed:
        raise Refused(
            "entities.other_tables",
            "The tables are not those of an entity store: " + "; ".join(listed) + ".",
            hint="Name others in MODAK_ENTITIES_ENTITY_MAIN_TABLE, _EAV_DATA_TABLE and _CHANGE_LOG_TABLE.",
        )


def _triggers_of(kind: str) -> tuple[str, ...]:
    return _NO_TRUNCATE if kind == "log" else TRIGGERS


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
        mark_main=sql.Identifier(tables.log.schema, f"{tables.log.name}_mark_main"),
        mark_eav=sql.Identifier(tables.log.schema, f"{tables.log.name}_mark_eav"),
        mark_applied=sql.Identifier(tables.log.schema, f"{tables.log.name}_mark_applied"),
        refuse=sql.Identifier(tables.log.schema, f"{tables.log.name}_no_truncate"),
    )
