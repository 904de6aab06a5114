"""The reference page is generated, complete and up to date; reading settings stays cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import modak.config
from modak.config import document, explain

ROOT = Path(__file__).parents[2]


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == document(), "run: python -m modak.config docs/configuration.md"


def test_every_setting_is_on_the_page_once_as_a_row() -> None:
    page = document()
    for setting in explain({}):
        assert page.count(f"| `{setting.name}` |") == 1
    assert "MODAK_CREDENTIALS_<REF>" in page
    assert "MODAK_SPARK_CONF_<NAME>" in page


def test_the_page_does_not_depend_on_the_machine() -> None:
    assert str(Path.home()) + "/" not in document()


def test_the_module_writes_the_page(tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    subprocess.run([sys.executable, "-m", "modak.config", str(target)], check=True, timeout=60)
    printed = subprocess.run([sys.executable, "-m", "modak.config"], check=True, timeout=60, capture_output=True)
    assert target.read_text(encoding="utf-8") == printed.stdout.decode() == document()


def test_importing_the_room_does_not_import_pydantic() -> None:
    code = "import sys, modak.config; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_loading_settings_imports_nothing_heavy() -> None:
    heavy = ["pyspark", "pyarrow", "duckdb", "pydantic_settings", "psycopg", "structlog"]
    code = f"import sys; from modak.config import load; load({{}}); sys.exit(any(m in sys.modules for m in {heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_resolves_and_others_do_not() -> None:
    for name in modak.config.__all__:
        assert getattr(modak.config, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = modak.config.nothing
