"""docker-compose.yml for real: build, up, a completion, each container killed, down.

Needs an engine and is long (it builds images with torch in them), so it runs only on request:

    SPECSPLIT_TEST_DOCKER=1 make test ARGS=tests/compose/test_engine.py

PYTHON_IMAGE, REDIS_IMAGE and PIP_ARGS choose where images and packages come from, as in docs/deploy.md. With
SPECSPLIT_TEST_DOCKER=built the images are taken as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
REQUESTED = os.environ.get("SPECSPLIT_TEST_DOCKER", "")
SERVICES = ("redis", "drafter", "verifier", "gateway")
READY_SECONDS = 900

pytestmark = [
    pytest.mark.skipif(not REQUESTED, reason="runs with SPECSPLIT_TEST_DOCKER=1"),
    pytest.mark.timeout(3600),
]


class Project:
    def __init__(self) -> None:
        found = subprocess.run(["docker", "compose", "version"], capture_output=True)
        self._command = ["docker", "compose"] if found.returncode == 0 else ["docker-compose"]
        self._environment = {**os.environ, "HTTP_PORT": "18000", "GRPC_PORT": "15051"}

    def compose(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, "--project-name", "specsplittest", *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def inspect(self, service: str) -> dict[str, Any]:
        id_ = self.compose("ps", "-q", service).strip()
        done = subprocess.run(["docker", "inspect", id_], capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)[0]
        return found

    def wait_healthy(self, service: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while (state := self.inspect(service)["State"]).get("Health", {}).get("Status") != "healthy":
            assert time.monotonic() < deadline, (
                service,
                state,
                self.compose("logs", "--tail", "30", service),
            )
            time.sleep(1)

    def complete(self) -> dict[str, Any]:
        body = {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 12,
            "temperature": 0,
        }
        reply = httpx.post("http://127.0.0.1:18000/v1/chat/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        return answer


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    project = Project()
    if REQUESTED != "built":
        project.compose("build")
    try:
        project.compose("up", "--detach", "--no-build")
        project.wait_healthy("gateway")
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans")


def test_up_serves_a_completion_and_caches_it(project: Project) -> None:
    first, second = project.complete(), project.complete()
    assert second["choices"] == first["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for service in SERVICES:
        project.wait_healthy(service)


def test_the_registry_holds_the_replica(project: Project) -> None:
    keys = project.compose("exec", "-T", "redis", "redis-cli", "keys", "kv:*").split()
    assert any(":r:verifier:50053" in key for key in keys)
    assert any(":b:verifier:50053:" in key for key in keys)


def test_every_service_writes_its_spans_and_metrics(project: Project) -> None:
    header = f"00-{'a' * 32}-{'b' * 16}-01"
    httpx.post(
        "http://127.0.0.1:18000/v1/completions",
        json={"prompt": "one two one two one two", "max_tokens": 20},
        headers={"traceparent": header},
        timeout=120,
    ).raise_for_status()
    time.sleep(3)  # the spans are exported in batches
    traces = project.compose("exec", "-T", "gateway", "cat", "/traces/traces.jsonl")
    for role in ("gateway", "drafter", "verifier"):
        assert f"specsplit-{role}" in traces
    assert "a" * 32 in traces
    assert "specsplit_" in httpx.get("http://127.0.0.1:18000/metrics", timeout=20).text


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_container_comes_back(project: Project, service: str) -> None:
    before = project.inspect(service)
    subprocess.run(["kill", "-9", str(before["State"]["Pid"])], check=True)
    deadline = time.monotonic() + 120
    while (now := project.inspect(service))["RestartCount"] == before["RestartCount"]:
        assert time.monotonic() < deadline, now["State"]
        time.sleep(0.2)
    project.wait_healthy(service)
    project.wait_healthy("gateway")
    deadline = time.monotonic() + 120
    while httpx.get("http://127.0.0.1:18000/ready", timeout=20).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    project.complete()
