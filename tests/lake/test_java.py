"""Calls to Java are few: names, types and handles are asked for once."""

from __future__ import annotations

from typing import Any

import pytest

from modak.lake.iceberg.java import Java
from modak.spark.gateway import Gateway


@pytest.fixture
def asked(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every command that goes to the JVM."""
    client = gateway.py4j._gateway_client
    commands: list[str] = []
    send = client.send_command

    def sending(command: str, *arguments: Any, **options: Any) -> Any:
        commands.append(command)
        return send(command, *arguments, **options)

    monkeypatch.setattr(client, "send_command", sending)
    return commands


def test_a_name_is_asked_for_once(gateway: Gateway, asked: list[str]) -> None:
    java = Java(gateway)
    parse = java.jvm.java.lang.Long.parseLong
    assert parse("7") == 7
    del asked[:]
    assert java.jvm.java.lang.Long.parseLong("8") == 8
    assert len(asked) == 1


def test_what_is_made_of_lasting_handles_is_made_once(gateway: Gateway, asked: list[str]) -> None:
    java = Java(gateway)
    items = java.strings(["a", "bb"])

    def lengths() -> list[str]:
        return java.texts(items, java.method("java.lang.String", "length", "int"))

    assert lengths() == ["1", "2"]
    del asked[:]
    assert lengths() == ["1", "2"]
    assert len(asked) < 15


def test_what_is_bound_to_one_object_is_not_kept_for_another(gateway: Gateway) -> None:
    java = Java(gateway)
    get = java.method("java.util.List", "get", "java.lang.Object", "int")
    of_text = java.static("java.lang.Integer", "parseInt", "int", "java.lang.String")
    found = [
        java.texts(java.strings(["0"]), java.after(of_text, get.bindTo(java.strings([word]))))
        for word in ("one", "two")
    ]
    assert found == [["one"], ["two"]]
