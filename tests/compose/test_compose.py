"""docker-compose.yml without an engine: it is valid, and every name in it is one that the services know."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from specsplit.cli.health import DEFAULT_ADDRESSES
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
MODELS = {"cpu": "model", "gpu": "model-gpu"}
VERIFIERS = {"cpu": {"verifier"}, "gpu": {"verifier-gpu-0", "verifier-gpu-1"}}
GATEWAYS = {"cpu": "gateway", "gpu": "gateway-gpu"}
SHARED = {"redis", "drafter"}
NAMES = sorted(SHARED | {*MODELS.values(), *GATEWAYS.values(), *VERIFIERS["cpu"], *VERIFIERS["gpu"]})
SERVICES = [name for name in NAMES if name.startswith(tuple(SETTINGS))]


def read(environment: dict[str, str]) -> dict[str, Any]:
    """The file with `${NAME-default}` and `${NAME:-default}` filled in."""

    def fill(match: re.Match[str]) -> str:
        name, is_for_empty, default = match[1], match[2] == ":-", match[3]
        value = environment.get(name, default)
        return default if is_for_empty and not value else value

    text = re.sub(r"\$\{(\w+)(:?-)([^}]*)\}", fill, (ROOT / "docker-compose.yml").read_text())
    assert "${" not in text
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read({})


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = compose["services"]
    return found


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in [name for name in os.environ if name.startswith("SPECSPLIT_")]:
        monkeypatch.delenv(variable)
    return monkeypatch


def role(name: str) -> str:
    return name.partition("-")[0]


def dockerfile(name: str) -> str:
    return (ROOT / role(name) / "Dockerfile").read_text()


def volumes(service: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for volume in service.get("volumes", []):
        source, path, *_ = volume.split(":")
        yield source, path


def test_it_follows_the_compose_specification(compose: dict[str, Any]) -> None:
    assert set(PyCompose.from_json(json.dumps(compose)).service_names()) == set(NAMES)
    broken = json.loads(json.dumps(compose).replace("service_healthy", "service_helthy"))
    with pytest.raises(ValueError, match="service_helthy"):
        PyCompose.from_json(json.dumps(broken))


def test_compose_itself_reads_it() -> None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True).returncode
        ):
            break
    else:
        pytest.skip("docker compose is not installed")
    for profile in ("cpu", "gpu"):
        done = subprocess.run(
            [*command, "--profile", profile, "config", "--services"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.split()) >= SHARED | {MODELS[profile], GATEWAYS[profile]} | VERIFIERS[profile]


def test_profiles_choose_cpu_by_default_and_gpus_on_request(services: dict[str, Any]) -> None:
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text().splitlines()
    for profile in ("cpu", "gpu"):
        expected = {MODELS[profile], GATEWAYS[profile], *VERIFIERS[profile]}
        assert {name for name in services if services[name].get("profiles") == [profile]} == expected
    assert {name for name in services if "profiles" not in services[name]} == SHARED


@pytest.mark.parametrize("name", SERVICES)
def test_every_variable_is_a_setting_of_its_service(
    services: dict[str, Any], name: str, bare_environment: pytest.MonkeyPatch
) -> None:
    prefix = f"SPECSPLIT_{role(name).upper()}_"
    assert f"{prefix}HOST=0.0.0.0" in dockerfile(name)
    for variable, value in services[name]["environment"].items():
        assert variable.startswith(prefix) or value is None, "passed on from the host or a setting of its own"
        if value is not None:
            bare_environment.setenv(variable, str(value))
    settings: Any = load_settings(SETTINGS[role(name)], [], prog="test")  # refuses what it does not know
    mounted = dict(volumes(services[name]))
    assert str(settings.trace_file).startswith(f"{mounted['traces']}/")
    stop_seconds = int(services[name]["stop_grace_period"].removesuffix("s"))
    assert stop_seconds > settings.drain_seconds


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_those_that_the_service_listens_on(
    services: dict[str, Any], name: str, bare_environment: pytest.MonkeyPatch
) -> None:
    if name.startswith("gateway"):
        bare_environment.setenv("SPECSPLIT_GATEWAY_TOKENIZER", "/models/tokenizer")
    settings = load_settings(SETTINGS[role(name)], [], prog="test").model_dump()
    ports = {str(value) for field, value in settings.items() if field.endswith("port")}
    (exposed,) = re.findall(r"^EXPOSE (.+)$", dockerfile(name), re.MULTILINE)
    assert set(exposed.split()) == ports
    assert DEFAULT_ADDRESSES[role(name)].rpartition(":")[2] in ports
    published = services[name].get("ports", [])  # of the gateway alone, and here on the loopback only
    assert set(published) == ({f"127.0.0.1:{p}:{p}" for p in ports} if role(name) == "gateway" else set())


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_services_find_each_other_and_start_in_order(services: dict[str, Any], profile: str) -> None:
    gateway, verifiers = services[GATEWAYS[profile]], VERIFIERS[profile]
    environment = gateway["environment"]
    addresses = {f"{name}:50053" for name in verifiers}
    assert set(environment["SPECSPLIT_GATEWAY_VERIFIERS"].split(",")) == addresses
    assert environment["SPECSPLIT_GATEWAY_DRAFTER"] == "drafter:50052"
    assert gateway["depends_on"] == {
        name: {"condition": "service_healthy"} for name in ("drafter", *verifiers)
    }
    model = services[MODELS[profile]]
    assert environment["SPECSPLIT_GATEWAY_TOKENIZER"] == f"{model['command'][-1]}/tokenizer"
    assert environment["SPECSPLIT_GATEWAY_MODEL_NAME"] == model["command"][0]
    for name in verifiers:
        verifier = services[name]
        assert verifier["depends_on"] == {
            MODELS[profile]: {"condition": "service_completed_successfully"},
            "redis": {"condition": "service_healthy"},
        }
        assert verifier["environment"]["SPECSPLIT_VERIFIER_ADVERTISE"] in addresses
        assert verifier["environment"]["SPECSPLIT_VERIFIER_MODEL"] == model["command"][0]
        redis_url = verifier["environment"]["SPECSPLIT_VERIFIER_REDIS_URL"]
        assert redis_url == environment["SPECSPLIT_GATEWAY_REDIS_URL"] == "redis://redis:6379"
        assert (verifier["image"], verifier["build"]) == (model["image"], model["build"])
    advertised = [services[name]["environment"]["SPECSPLIT_VERIFIER_ADVERTISE"] for name in verifiers]
    assert len(set(advertised)) == len(verifiers)


def test_each_gpu_replica_has_gpus_of_its_own(services: dict[str, Any]) -> None:
    reserved: list[str] = []
    for name in VERIFIERS["gpu"]:
        assert services[name]["environment"]["SPECSPLIT_VERIFIER_DEVICE"] == "cuda"
        (devices,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert devices["capabilities"] == ["gpu"]
        assert devices["device_ids"]
        reserved += devices["device_ids"]
    assert len(reserved) == len(set(reserved))


@pytest.mark.parametrize("name", NAMES)
def test_every_service_is_confined_watched_and_kept_up(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert (service["read_only"], service["init"], service["cap_drop"]) == (True, True, ["ALL"])
    if name in SERVICES:
        assert re.search(r"^USER specsplit$", dockerfile(name), re.MULTILINE)
    assert {source for source, _ in volumes(service)} <= set(compose["volumes"])
    if name in MODELS.values():  # it ends
        assert service["restart"] == "no"
        return
    assert service["restart"] == "unless-stopped"
    test = service["healthcheck"]["test"]
    assert test == (
        ["CMD", "redis-cli", "ping"] if name == "redis" else ["CMD", "specsplit", "health", role(name)]
    )


def test_the_registry_keeps_nothing_and_frees_large_sets_aside(services: dict[str, Any]) -> None:
    command = services["redis"]["command"]
    for option in (
        '--save ""',
        "--appendonly no",
        "--lazyfree-lazy-expire yes",
        "--maxmemory-policy noeviction",
    ):
        assert option in command
    assert "ports" not in services["redis"]


def test_images_are_built_from_files_that_are_there(services: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / path).exists() for path in sent)
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= sent
    assert {"pyproject.toml", "constraints.txt", project["project"]["readme"], "LICENSE"} <= sent
    for name in SERVICES:
        build = services[name]["build"]
        assert build["dockerfile"] == f"{role(name)}/Dockerfile"
        assert all(f"ARG {argument}" in dockerfile(name) for argument in build["args"])
        for sources in re.findall(r"^COPY (.+) \S+$", dockerfile(name), re.MULTILINE):
            assert all(source == "." or source in sent for source in sources.split())


@pytest.mark.parametrize("name", ["gateway", "drafter"])
def test_gateway_and_drafter_are_built_and_start_without_torch(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"pip install .* '?\.(?:\[(\w+)\])?'?$", dockerfile(name), re.MULTILINE)
    assert extras == ("gateway" if name == "gateway" else "")
    wanted = project["dependencies"] + project["optional-dependencies"].get(extras, [])
    heavy = re.compile(r"(torch|transformers|numba|numpy|accelerate|specsplit)\b")
    assert not [dependency for dependency in wanted if heavy.match(dependency)]
    started = subprocess.run(
        [sys.executable, "-c", f"import sys, specsplit.{name}.main; sys.exit('torch' in sys.modules)"],
        check=False,
    )
    assert started.returncode == 0


def test_the_variables_of_the_host_reach_their_places() -> None:
    """Those that docs/deploy.md names."""
    environment = {
        "BIND_ADDRESS": "0.0.0.0",
        "HTTP_PORT": "80",
        "GRPC_PORT": "81",
        "MODEL": "some/model",
        "TRACE_RATIO": "1",
        "PYTHON_IMAGE": "python:other",
        "REDIS_IMAGE": "valkey/valkey",
        "CPU_TORCH_INDEX": "",
        "GPU_TORCH_INDEX": "https://example.org/cuda",
    }
    documented = (ROOT / "docs" / "deploy.md").read_text()
    assert all(f"`{name}`" in documented for name in environment)
    services = read(environment)["services"]
    assert services["gateway"]["ports"] == ["0.0.0.0:80:8000", "0.0.0.0:81:50051"]
    assert services["model"]["command"][0] == "some/model"
    assert services["verifier"]["environment"]["SPECSPLIT_VERIFIER_MODEL"] == "some/model"
    assert services["gateway-gpu"]["environment"]["SPECSPLIT_GATEWAY_TRACE_RATIO"] == 1
    assert services["redis"]["image"] == "valkey/valkey"
    assert {services[name]["build"]["args"]["PYTHON_IMAGE"] for name in SERVICES} == {"python:other"}
    assert not services["verifier"]["build"]["args"]["TORCH_INDEX"]
    assert services["verifier-gpu-0"]["build"]["args"]["TORCH_INDEX"] == "https://example.org/cuda"
    named = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    assert named == set(environment)
