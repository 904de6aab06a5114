"""Where the files of a schema lie, and the ids in their names. Pure.

A file is written under `_tmp` first and copied to its final name; only a manifest makes it part of the store.
"""

from __future__ import annotations

import secrets
import uuid

from modak.core.clock import Clock

NO_KEY = str(uuid.UUID(int=0))
"""Stands for both ends of the row-id range of a file without rows."""


def build_delta_path(prefix: str, schema_id: int, file_uuid: str) -> str:
    """The final path of a delta file."""
    return f"{delta_folder(prefix, schema_id)}/{file_uuid}.parquet"


def build_temp_path(prefix: str, schema_id: int, file_uuid: str) -> str:
    """The path of a delta file before it is copied to its final one."""
    return f"{delta_folder(prefix, schema_id)}/_tmp/{file_uuid}.parquet"


def build_base_path(prefix: str, schema_id: int, min_row_id: str, max_row_id: str, file_uuid: str = "") -> str:
    """The final path of a base file, named after the row ids it covers; our own files also have a unique part."""
    unique = f"_{file_uuid}" if file_uuid else ""
    return f"{base_folder(prefix, schema_id)}/{min_row_id}_{max_row_id}{unique}.parquet"


def build_base_temp_path(prefix: str, schema_id: int, file_uuid: str) -> str:
    """The path of a base file before it is copied to its final one."""
    return f"{base_folder(prefix, schema_id)}/_tmp/{file_uuid}.parquet"


def delta_folder(prefix: str, schema_id: int) -> str:
    """The folder of a schema's delta files."""
    return _below(prefix, f"delta/{schema_id}")


def base_folder(prefix: str, schema_id: int) -> str:
    """The folder of a schema's base files."""
    return _below(prefix, f"base/{schema_id}")


def is_temporary(path: str) -> bool:
    """Whether a path is that of a file on its way."""
    return "_tmp" in path.split("/")[:-1]


def uuid7(clock: Clock) -> str:
    """A UUID of version 7: sorted by the moment it was made, unique without coordination."""
    millis = int(clock.now().timestamp() * 1000) & ((1 << 48) - 1)
    chance = secrets.randbits(74)
    value = millis << 80 | 0x7 << 76 | (chance >> 62) << 64 | 0b10 << 62 | chance & ((1 << 62) - 1)
    return str(uuid.UUID(int=value))


def _below(prefix: str, rest: str) -> str:
    return f"{prefix.strip('/')}/{rest}" if prefix.strip("/") else rest
