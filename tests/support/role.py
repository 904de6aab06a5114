"""The roles of docs/production.md, made with exactly the statements that it shows."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import replace
from pathlib import Path

from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer

PAGE = Path(__file__).parents[2] / "docs" / "production.md"


def statements(beginning: str) -> list[str]:
    """The statements of the page's block that begins so."""
    block = re.search(rf"```sql\n({beginning}.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    return [line for line in block[1].splitlines() if line.strip()]


def way_in(server: EmbeddedServer, database: str) -> Dsn:
    """As whom tests work in a database; `LEAST_PRIVILEGE=1 pytest -m "not superuser" …` takes the page's role."""
    return least_privileged(server, database) if os.environ.get("LEAST_PRIVILEGE") else server.dsn(database)


def least_privileged(server: EmbeddedServer, database: str) -> Dsn:
    """Run them in a database, for a role and an owner of its own, and return that role's way in."""
    tag = secrets.token_hex(4)
    role, owner, password = f"worker_{tag}", f"owner_{tag}", secrets.token_hex(8)
    dsn = server.dsn(database)
    with connect(dsn, autocommit=True) as conn:
        conn.execute(f"CREATE ROLE {owner} NOLOGIN")  # type: ignore[arg-type]
        conn.execute(f"GRANT USAGE, CREATE ON SCHEMA public TO {owner}")  # type: ignore[arg-type]
        for statement in statements("CREATE ROLE modak_worker"):
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


def granted_further(server: EmbeddedServer, dsn: Dsn) -> tuple[str, str]:
    """A new schema and a new owner, for whom the page's grants are given once more: their names."""
    tag = secrets.token_hex(4)
    schema, owner = f"schema_{tag}", f"owner_{tag}"
    with connect(server.dsn(dsn.dbname), autocommit=True) as conn:
        conn.execute(f"CREATE SCHEMA {schema}")  # type: ignore[arg-type]
        conn.execute(f"CREATE ROLE {owner} NOLOGIN")  # type: ignore[arg-type]
        conn.execute(f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {owner}")  # type: ignore[arg-type]
        grants = [
            each for each in statements("CREATE ROLE modak_worker") if "SCHEMA public" in each or "app_owner" in each
        ]
        assert len(grants) == 2
        for grant in grants:
            words = {"modak_worker": dsn.user, "app_owner": owner, "SCHEMA public": f"SCHEMA {schema}"}
            for word, becomes in words.items():
                grant = grant.replace(word, becomes)  # noqa: PLW2901
            conn.execute(grant)  # type: ignore[arg-type]
    return schema, owner


def watcher(server: EmbeddedServer, database: str) -> Dsn:
    """A role that has what the page gives to whoever watches, and nothing else."""
    role, password = f"watcher_{secrets.token_hex(4)}", secrets.token_hex(8)
    assert "Whoever watches gets\n`pg_monitor`" in PAGE.read_text()
    dsn = server.dsn(database)
    with connect(dsn, autocommit=True) as conn:
        conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{password}' IN ROLE pg_monitor")  # type: ignore[arg-type]
    return replace(dsn, user=role, password=password)


def may_replicate(server: EmbeddedServer, dsn: Dsn) -> Dsn:
    """The same role, which may also mirror tables; a superuser may already."""
    if dsn.user == server.dsn(dsn.dbname).user:
        return dsn
    with connect(server.dsn(dsn.dbname), autocommit=True) as conn:
        for statement in statements("ALTER ROLE"):
            conn.execute(statement.replace("modak_worker", dsn.user))  # type: ignore[arg-type]
    return dsn


def reader(server: EmbeddedServer, database: str, table: str) -> Dsn:
    """A role for queries over HTTP that may read one table, made with the statements of the page."""
    role, password = f"reader_{secrets.token_hex(4)}", secrets.token_hex(8)
    dsn = server.dsn(database)
    with connect(dsn, autocommit=True) as conn:
        for statement in statements("CREATE ROLE modak_reader"):
            words = {
                "modak_reader": role,
                "change-me": password,
                "DATABASE app": f"DATABASE {database}",
                "public.events": table,
            }
            for word, becomes in words.items():
                statement = statement.replace(word, becomes)  # noqa: PLW2901
            conn.execute(statement)  # type: ignore[arg-type]
    return replace(dsn, user=role, password=password)


def owner_of(dsn: Dsn) -> str:
    """The owner whose tables a role made here may work on."""
    return dsn.user.replace("worker_", "owner_")
