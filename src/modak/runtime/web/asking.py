"""SQL over HTTP: `query` and `explain`. `MODAK_CONSOLE_SQL=false` takes both away."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, Field

from modak.runtime.web.context import API, Context
from modak.runtime.web.errors import RESPONSES, Wrong
from modak.runtime.web.queries import LONGEST_TEXT

_MORE: dict[int | str, dict[str, Any]] = {
    **RESPONSES,
    403: {
        "model": Wrong,
        "description": "The token does not allow this, or the role for queries may not read the table",
    },
    408: {"model": Wrong, "description": "The query took too long"},
    413: {"model": Wrong, "description": "The query needs too much memory, or its answer is too large"},
    429: {"model": Wrong, "description": "Too many queries at once"},
}


class Question(BaseModel):
    """A statement that only reads."""

    sql: str = Field(min_length=1, max_length=LONGEST_TEXT, description="Spark SQL over registered tables")


class Limited(Question):
    """A statement with limits below those of the server."""

    max_rows: int | None = Field(None, ge=1, le=1_000_000)
    timeout_seconds: float | None = Field(None, gt=0, le=86_400)


class Column(BaseModel):
    """A column of an answer."""

    name: str
    type: str


class Answer(BaseModel):
    """Rows, every value as text in its exact form, or null."""

    columns: list[Column]
    rows: list[list[str | None]]
    truncated: bool
    seconds: float


def router(context: Context) -> APIRouter:
    """The routes under `/api/v1` that answer SQL."""
    routes = APIRouter(prefix=API, tags=["sql"], dependencies=[Depends(context.guard.reader)], responses=_MORE)

    @routes.post("/query", summary="Ask heap and lake as one", response_model=Answer)
    def query(question: Limited) -> Response:
        """All tables are read at one moment, with the rights of the role for queries where there is one.

        Only queries run; scripts, calls into Java and files by path do not.
        """
        return _json(context.queries.ask(question.sql, question.max_rows, question.timeout_seconds))

    @routes.post("/explain", summary="Which tier a query reads", response_model=dict[str, Any])
    def explain(question: Question) -> Response:
        """Per use of a table: columns, filter, and the ranges of heap and lake. Nothing runs."""
        return _json(context.queries.explain(question.sql))

    return routes


def _json(answer: bytes) -> Response:
    # As it came from the child: reading it again would take several times its memory.
    return Response(answer, media_type="application/json")
