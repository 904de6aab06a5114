"""The files in `deploy/` are well formed, name settings that exist, and start what they should."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from modak.config.fields import declared
from modak.config.settings import concerns

DEPLOY = Path(__file__).parents[2] / "deploy"
SETTINGS = {item.variable for model in concerns().values() for item in declared(model)}


def test_no_file_names_a_setting_that_does_not_exist() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    assert len(files) >= 7
    for path in files:
        named = set(re.findall(r"\bMODAK_[A-Z0-9_]+\b", path.read_text()))
        assert named - SETTINGS == set(), path


def test_the_dockerfile_runs_the_worker_unprivileged_with_a_probe() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    words: dict[str, list[str]] = {}
    for word, rest in steps:
        words.setdefault(word, []).append(rest)
    assert set(words) <= {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL",
                          "HEALTHCHECK", "ENTRYPOINT", "CMD"}  # fmt: skip
    assert words["USER"] == ["10001:10001"]
    assert yaml.safe_load(words["ENTRYPOINT"][-1]) == ["modak-worker"]
    assert yaml.safe_load(words["CMD"][-1]) == ["run"]
    assert "--require-hashes" in words["RUN"][0]
    assert "/livez" in words["HEALTHCHECK"][0]
    for source in (rest.split()[:-1] for rest in words["COPY"] if not rest.startswith("--from")):
        for name in source:
            assert (DEPLOY.parent / name).exists()


def test_the_compose_file_is_a_group_of_two_on_one_postgres() -> None:
    found: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    workers = {name: each for name, each in found["services"].items() if name.startswith("worker")}
    assert len(workers) == 2
    for each in workers.values():
        assert each["depends_on"]["postgres"]["condition"] == "service_healthy"
        assert each["environment"]["MODAK_PG_URL"].startswith("postgresql://postgres:5432/")
        assert "/readyz" in each["healthcheck"]["test"][-1]
        assert (DEPLOY / each["build"]["context"] / each["build"]["dockerfile"]).exists()
        assert all(port.startswith("127.0.0.1:") for port in each["ports"])
    assert "wal_level=logical" in found["services"]["postgres"]["command"]
    assert not re.search(r"(PASSWORD|TOKEN): (?!\$\{)\S", (DEPLOY / "compose.yaml").read_text()), "a secret in a file"


def made_by_the_image() -> set[str]:
    """The folders that the image gives to the user it runs as."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    user = re.search(r"useradd --uid 10001 --gid modak --create-home --home-dir (\S+) modak", text)
    assert user
    return {user[1], *re.findall(r"install -d -o modak -g modak -m \d+ (\S+)", text.partition("\nUSER ")[0])}


def test_what_a_worker_mounts_belongs_to_the_user_of_the_image() -> None:
    found: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    workers = [each for name, each in found["services"].items() if name.startswith("worker")]
    mounted = {volume.split(":")[1] for each in workers for volume in each["volumes"]}
    assert all(each["environment"]["MODAK_WAREHOUSE"] in mounted for each in workers)
    assert mounted <= made_by_the_image()
    [deployment] = [
        each
        for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "modak.yaml").read_text())
        if each["kind"] == "Deployment"
    ]
    pod = deployment["spec"]["template"]["spec"]
    user = pod["securityContext"]
    assert (user["runAsUser"], user["runAsGroup"], user["fsGroup"]) == (10001, 10001, 10001)
    [container] = pod["containers"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} <= made_by_the_image()


def test_the_kubernetes_objects_probe_what_the_worker_serves() -> None:
    objects = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "modak.yaml").read_text())}
    assert set(objects) == {"ServiceAccount", "Deployment", "Service", "PodDisruptionBudget"}
    spec = objects["Deployment"]["spec"]
    assert spec["replicas"] >= 2
    [container] = spec["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["args"] == ["run"]
    assert spec["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
    labels = spec["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"] == labels


def test_the_systemd_unit_restarts_and_ends_the_worker_well() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "modak-worker.service")
    service = unit["Service"]
    assert shlex.split(service["ExecStart"])[1:] == ["run"]
    assert service["Restart"] == "always"
    assert service["KillSignal"] == "SIGTERM"
    assert service["User"] == "modak"
    assert service["ProtectSystem"] == "strict"
    assert f"MODAK_HOME=/var/lib/{service['StateDirectory']}" in (DEPLOY / "systemd/modak-worker.service").read_text()
    assert int(service["TimeoutStopSec"]) >= 30
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_the_scrape_file_asks_with_a_token() -> None:
    found: Any = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    [job] = found["scrape_configs"]
    assert job["authorization"]["type"] == "Bearer"
    assert (DEPLOY / "prometheus" / found["rule_files"][0]).exists()
