"""The least-privilege role, made with exactly the statements that docs/production.md shows."""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from pathlib import Path

from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer

PAGE = Path(__file__).parents[2] / "docs" / "production.md"


def grants() -> list[str]:
    """The statements of the page."""
    block = re.search(r"```sql\n(CREATE ROLE.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    return [line for line in block[1].splitlines() if line.strip()]


def least_privileged(server: EmbeddedServer, database: str) -> Dsn:
    """Run them in a database, for a role and an owner of its own, and return that role's way in."""
    tag = secrets.token_hex(4)
    role, owner, password = f"worker_{tag}", f"owner_{tag}", secrets.token_hex(8)
    dsn = server.dsn(database)
    with connect(dsn, autocommit=True) as conn:
        conn.execute(f"CREATE ROLE {owner} NOLOGIN")  # type: ignore[arg-type]
        conn.execute(f"GRANT USAGE, CREATE ON SCHEMA public TO {owner}")  # type: ignore[arg-type]
        for statement in grants():
            words = {
                "modak_worker": role,
                "change-me": password,
                "app_owner": owner,
                "DATABASE app": f"DATABASE {database}",
            }
            for word, becomes in words.items():
                statement = statement.replace(word, becomes)  # noqa: PLW2901
            conn.execute(statement)  # type: ignore[arg-type]
    return replace(dsn, user=role, password=password)


def owner_of(dsn: Dsn) -> str:
    """The owner whose tables a role made here may work on."""
    return dsn.user.replace("worker_", "owner_")
