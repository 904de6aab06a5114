"""Where the Postgres of an entity store is, and how to be let in, at every connection anew.

With `pg_use_iam` the password is a token that a command prints; it is fetched for every connection, in the driver and
in tasks, because such tokens live for minutes. TLS is asked for everywhere but on this machine.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass, field, replace
from functools import cache

import structlog

from modak.core import loopback
from modak.core.errors import ModakError, UsageError
from modak.entities.config import CDCConfig
from modak.postgres.dsn import Dsn

log = structlog.get_logger()

TOKEN_SECONDS = 30.0


@dataclass(frozen=True)
class Address:
    """A database, and the command that prints the password of the moment where there is one."""

    dsn: Dsn
    token_command: str = field(default="", repr=False)

    def fresh(self) -> Dsn:
        """The address to connect with now."""
        return replace(self.dsn, password=self._token()) if self.token_command else self.dsn

    def _token(self) -> str:
        environment = {
            **os.environ,
            "PGHOST": self.dsn.host,
            "PGPORT": str(self.dsn.port),
            "PGUSER": self.dsn.user,
            "PGDATABASE": self.dsn.dbname,
        }
        try:
            done = subprocess.run(
                shlex.split(self.token_command),
                env=environment,
                capture_output=True,
                text=True,
                timeout=TOKEN_SECONDS,
                check=True,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            # What the command printed may hold a part of a token, so none of it is repeated.
            raise ModakError(
                "entities.no_token",
                f"The command of MODAK_ENTITIES_PG_TOKEN_COMMAND gave no token ({type(error).__name__}).",
                hint="Run it by hand; it must print the token and nothing else.",
                retryable=True,
            ) from None
        token = done.stdout.strip()
        if not token:
            raise ModakError(
                "entities.no_token", "The command of MODAK_ENTITIES_PG_TOKEN_COMMAND printed nothing.", retryable=True
            )
        return token


def address_of(config: CDCConfig, otherwise: Dsn | None = None) -> Address:
    """The address that the configuration names, or else the one of the settings."""
    if not config.pg_host:
        if otherwise is None:
            raise UsageError("entities.no_postgres", "No Postgres is named.", hint="Set MODAK_ENTITIES_PG_HOST.")
        return Address(_protected(otherwise, config.pg_ssl_mode), _command(config))
    dsn = Dsn(
        config.pg_host,
        config.pg_port,
        config.pg_db,
        config.pg_user,
        config.pg_password,
    )
    return Address(_protected(dsn, config.pg_ssl_mode), _command(config))


def is_loopback(host: str) -> bool:
    """Whether a Postgres is on this machine: by its address, or by its socket's folder."""
    return host.startswith("/") or loopback.is_loopback(host)


def _protected(dsn: Dsn, mode: str) -> Dsn:
    """The address with the TLS mode that is wanted, unless it brings its own; none is needed on this machine."""
    if any(name == "sslmode" for name, _ in dsn.options):
        return dsn
    if is_loopback(dsn.host) and mode == "require":
        _say_plain(dsn.host)
        mode = "disable"
    return replace(dsn, options=(*dsn.options, ("sslmode", mode)))


def _command(config: CDCConfig) -> str:
    if config.pg_use_iam and not config.pg_token_command:
        raise UsageError(
            "entities.no_token_command",
            "MODAK_ENTITIES_PG_USE_IAM asks for tokens, and no command prints them.",
            hint="Set MODAK_ENTITIES_PG_TOKEN_COMMAND, for instance to: aws rds generate-db-auth-token …",
        )
    return config.pg_token_command if config.pg_use_iam else ""


@cache
def _say_plain(host: str) -> None:
    log.info("entities.without_tls", host=host, because="it is this machine")
