"""docker-compose.yml without an engine: valid, and every name in it is one that the services know."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from specsplit.core.settings import Settings, load_settings
from specsplit.drafter.settings import DrafterSettings
from specsplit.gateway.settings import GatewaySettings
from specsplit.verifier.settings import VerifierSettings

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "drafter": DrafterSettings,
    "verifier": VerifierSettings,
}
CPU = {"redis", "model", "drafter", "verifier", "gateway"}
GPU = {"redis", "model", "drafter", "verifier-gpu-0", "verifier-gpu-1", "gateway-gpu"}


def compose_command() -> list[str]:
    for command in (["docker-compose"], ["docker", "compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True).returncode
        ):
            return command
    pytest.skip("docker compose is not installed")


def resolved() -> dict[str, Any]:
    """The file as compose reads it, checked against the compose specification; needs no engine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}
    done = subprocess.run(
        [*compose_command(), "--profile", "cpu", "--profile", "gpu", "config"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    config: dict[str, Any] = yaml.safe_load(done.stdout)
    return config


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = resolved()["services"]
    return found


def role(name: str) -> str:
    return name.partition("-")[0]


def test_profiles_choose_cpu_by_default_and_gpus_on_request(services: dict[str, Any]) -> None:
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text().splitlines()
    for profile, expected in (("cpu", CPU), ("gpu", GPU)):
        assert {n for n, s in services.items() if profile in s.get("profiles", [profile])} == expected


@pytest.mark.parametrize("name", sorted((CPU | GPU) - {"redis", "model"}))
def test_every_variable_is_a_setting_of_its_service(
    services: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = services[name]["environment"]
    for variable in [v for v in os.environ if v.startswith("SPECSPLIT_")]:
        monkeypatch.delenv(variable)
    dockerfile = (ROOT / role(name) / "Dockerfile").read_text()
    assert f"SPECSPLIT_{role(name).upper()}_HOST=0.0.0.0" in dockerfile
    for variable, value in environment.items():
        monkeypatch.setenv(variable, str(value))
        assert variable.startswith((f"SPECSPLIT_{role(name).upper()}_", "OTEL_"))
    settings: Any = load_settings(SETTINGS[role(name)], [], prog="test")
    assert str(settings.trace_file).startswith("/traces/")
    for port in (p for field, p in settings.model_dump().items() if field.endswith("port") and p):
        assert str(port) in dockerfile.partition("EXPOSE")[2].split()


def test_services_find_each_other(services: dict[str, Any]) -> None:
    for gateway, verifiers in (
        ("gateway", {"verifier"}),
        ("gateway-gpu", GPU & {"verifier-gpu-0", "verifier-gpu-1"}),
    ):
        environment = services[gateway]["environment"]
        advertised = {services[name]["environment"]["SPECSPLIT_VERIFIER_ADVERTISE"] for name in verifiers}
        assert set(environment["SPECSPLIT_GATEWAY_VERIFIERS"].split(",")) == advertised
        assert advertised == {f"{name}:50053" for name in verifiers}
        assert environment["SPECSPLIT_GATEWAY_DRAFTER"] == "drafter:50052"
        needed = services[gateway]["depends_on"]
        assert {name for name, how in needed.items() if how["condition"] == "service_healthy"} == {
            "drafter",
            *verifiers,
        }
        for name in verifiers:
            assert services[name]["depends_on"] == {
                "model": {"condition": "service_completed_successfully"},
                "redis": {"condition": "service_healthy"},
            }
            assert (
                services[name]["environment"]["SPECSPLIT_VERIFIER_REDIS_URL"]
                == environment["SPECSPLIT_GATEWAY_REDIS_URL"]
            )


def test_each_gpu_replica_has_gpus_of_its_own(services: dict[str, Any]) -> None:
    reserved = [
        id_
        for name in sorted(GPU)
        if name.startswith("verifier")
        for device in services[name]["deploy"]["resources"]["reservations"]["devices"]
        for id_ in device["device_ids"]
    ]
    assert len(reserved) == len(set(reserved)) >= 2


@pytest.mark.parametrize("name", sorted(CPU | GPU))
def test_every_service_is_confined_and_watched(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    if name == "model":
        assert service["restart"] == "no"
        return
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert ("ports" in service) == (role(name) == "gateway")  # nothing else is reachable from outside


def test_images_get_all_that_they_are_built_from_and_no_torch_too_many() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= kept
    assert {"pyproject.toml", "constraints.txt", project["project"]["readme"], "LICENSE"} <= kept
    assert all((ROOT / path).exists() for path in kept)
    light = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["gateway"]
    heavy = ("torch", "transformers", "numba", "accelerate")
    assert not [name for name in light if name.startswith(heavy)]
    extras = {name: (ROOT / name / "Dockerfile").read_text() for name in SETTINGS}
    assert "'.[gateway]'" in extras["gateway"]
    assert "'.[" not in extras["drafter"]
    assert "'.[engine]'" in extras["verifier"]
