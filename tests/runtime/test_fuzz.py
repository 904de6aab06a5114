"""Whatever a client sends, the API answers and never with a 500: requests made up by schemathesis from the document."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from starlette.testclient import TestClient

from modak.runtime.leader import Leader
from modak.runtime.web.app import create_app
from modak.tables.site import Site
from tests.runtime.conftest import led
from tests.runtime.test_measurement_routes import leads, served, store
from tests.tables.events import Events

__all__ = ["leads", "served", "store"]

_LEFT_OUT = {"/api/v1/query", "/api/v1/explain", "/readyz"}
"""SQL needs Spark and has a test of its own; a probe that says 503 means it."""


@pytest.fixture
def schema(site: Site, events: Events, leader: Leader) -> schemathesis.openapi.OpenApiSchema:
    events.register()
    events.tier(leader)
    app = create_app(led(site))
    return schemathesis.openapi.from_asgi("/api/v1/openapi.json", app, headers={"Host": "127.0.0.1"}).exclude(
        path=sorted(_LEFT_OUT)
    )


def fuzz(schema: schemathesis.openapi.OpenApiSchema, examples: int) -> int:
    asked = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            database=None,
        )
        @hypothesis.given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=[not_a_server_error], headers={"Host": "127.0.0.1"})

        ask()
        asked += 1
    return asked


def test_made_up_requests_find_no_500(schema: schemathesis.openapi.OpenApiSchema) -> None:
    assert fuzz(schema, 6) > 25


def test_made_up_requests_to_stores_that_are_served_find_no_500(leads: TestClient) -> None:
    described = schemathesis.openapi.from_asgi("/api/v1/openapi.json", leads.app, headers={"Host": "127.0.0.1"})
    assert fuzz(described.include(path_regex="/(measurements|cluster)/"), 10) >= 7


@pytest.mark.full
@pytest.mark.spark
def test_made_up_sql_finds_no_500(schema: schemathesis.openapi.OpenApiSchema, site: Site) -> None:
    app = create_app(led(site))
    described = schemathesis.openapi.from_asgi("/api/v1/openapi.json", app, headers={"Host": "127.0.0.1"})
    assert fuzz(described.include(path=["/api/v1/query", "/api/v1/explain"]), 40) == 2


@pytest.mark.full
def test_many_made_up_requests_find_no_500(schema: schemathesis.openapi.OpenApiSchema) -> None:
    assert fuzz(schema, 150) > 25
