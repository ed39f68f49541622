"""docker-compose.yml for real: build, up, completions, each container killed, down.

Needs a container engine and takes minutes, so it runs on request only:

    SPECSPLIT_TEST_DOCKER=1 make test ARGS=tests/compose/test_engine.py

SPECSPLIT_TEST_DOCKER=built takes the images as they are. The variables of docs/deploy.md count here too.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from specsplit.v1 import gateway_pb2, gateway_pb2_grpc

ROOT = Path(__file__).parents[2]
REQUESTED = os.environ.get("SPECSPLIT_TEST_DOCKER", "")
SERVICES = ("redis", "drafter", "verifier", "gateway")
READY_SECONDS = 900.0
PROMPT = "What is the capital of France?"

pytestmark = [
    pytest.mark.skipif(not REQUESTED, reason="needs a container engine: SPECSPLIT_TEST_DOCKER=1"),
    pytest.mark.timeout(3600),
]


def wait_until(is_true: Callable[[], bool], what: str, *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Project:
    """A running copy of docker-compose.yml, with the CPU's services."""

    def __init__(self) -> None:
        found = subprocess.run(["docker", "compose", "version"], capture_output=True)
        self._command = ["docker", "compose"] if found.returncode == 0 else ["docker-compose"]
        self.http, self.grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))
        ports = {"HTTP_PORT": self.http, "GRPC_PORT": self.grpc}
        self._environment = {
            **os.environ,
            **{name: address.partition(":")[2] for name, address in ports.items()},
            "BIND_ADDRESS": "127.0.0.1",
            "COMPOSE_PROFILES": "cpu",
        }

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
        container = self.compose("ps", "--quiet", "--all", service).strip()
        done = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)[0]
        return found

    def wait_healthy(self, service: str) -> None:
        def is_healthy() -> bool:
            return bool(self.inspect(service)["State"]["Health"]["Status"] == "healthy")

        wait_until(is_healthy, f"{service} does not become healthy", seconds=READY_SECONDS)

    def wait_ready(self) -> None:
        wait_until(self._is_ready, "the gateway does not become ready", seconds=READY_SECONDS)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"http://{self.http}/ready", timeout=20).status_code == 200
        except httpx.TransportError:
            return False

    def chat(self) -> dict[str, Any]:
        body = {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 12,
            "temperature": 0,
        }
        reply = httpx.post(f"http://{self.http}/v1/chat/completions", json=body, timeout=180)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        return answer

    def chat_over_grpc(self) -> str:
        with grpc.insecure_channel(self.grpc) as channel:
            request = gateway_pb2.GenerateRequest(
                chat=gateway_pb2.ChatPrompt(messages=[gateway_pb2.ChatMessage(role="user", content=PROMPT)]),
                max_tokens=12,
                temperature=0,
            )
            events = gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=180)
            return "".join(event.delta.text for event in events if event.HasField("delta"))


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    project = Project()
    try:
        if REQUESTED != "built":
            project.compose("build")
        project.compose("up", "--detach", "--no-build")
        for service in SERVICES:
            project.wait_healthy(service)
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans")


def test_completions_over_http_and_grpc_are_the_same_and_cached(project: Project) -> None:
    first, second = project.chat(), project.chat()
    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert project.chat_over_grpc() == first["choices"][0]["message"]["content"]


def test_services_started_in_the_order_of_their_needs(project: Project) -> None:
    started = {service: project.inspect(service)["State"]["StartedAt"] for service in SERVICES}
    model = project.inspect("model")["State"]
    assert model["ExitCode"] == 0
    assert model["FinishedAt"] < started["verifier"] < started["gateway"]
    assert started["redis"] < started["verifier"]


def test_the_registry_holds_the_replica_by_its_name(project: Project) -> None:
    project.chat()

    def is_published() -> bool:
        keys = project.compose("exec", "-T", "redis", "redis-cli", "--scan", "--pattern", "kv:*").split()
        return any(":r:verifier:50053" in key for key in keys) and any(
            ":b:verifier:50053:" in key for key in keys
        )

    wait_until(is_published, "the verifier's blocks are not in the registry")


def test_every_service_writes_its_spans_and_metrics(project: Project) -> None:
    trace_id = "a" * 32
    reply = httpx.post(
        f"http://{project.http}/v1/completions",
        json={"model": "smollm2-135m-instruct", "prompt": "one two one two one two", "max_tokens": 20},
        headers={"traceparent": f"00-{trace_id}-{'b' * 16}-01"},
        timeout=180,
    )
    assert reply.status_code == 200, reply.text

    def is_traced() -> bool:
        spans = project.compose("exec", "-T", "gateway", "cat", "/traces/traces.jsonl")
        return trace_id in spans and all(
            f"specsplit-{role}" in spans for role in ("gateway", "drafter", "verifier")
        )

    wait_until(is_traced, "spans are missing")
    metrics = httpx.get(f"http://{project.http}/metrics", timeout=20)
    assert "specsplit_" in metrics.text
    for service, port in (("drafter", 9052), ("verifier", 9053)):
        fetch = (
            f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
        )
        assert "specsplit_" in project.compose("exec", "-T", service, "python", "-c", fetch)


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_container_comes_back(project: Project, service: str) -> None:
    before = project.inspect(service)
    subprocess.run(["kill", "-9", str(before["State"]["Pid"])], check=True)
    wait_until(
        lambda: project.inspect(service)["RestartCount"] > before["RestartCount"],
        f"{service} is not restarted",
    )
    project.wait_healthy(service)
    project.wait_ready()
    project.chat()
    project.chat_over_grpc()


@pytest.mark.parametrize("service", ["redis", "drafter", "verifier"])
def test_a_stream_outlives_what_dies_behind_the_gateway(project: Project, service: str) -> None:
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": "one two three one two three one two",
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
    }
    url = f"http://{project.http}/v1/completions"
    whole = httpx.post(url, json=body, timeout=180).json()["choices"][0]["text"]
    texts: list[str] = []
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=300) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
            if len(texts) == 5:
                subprocess.run(["kill", "-9", str(project.inspect(service)["State"]["Pid"])], check=True)
    assert "".join(texts) == whole
    project.wait_ready()
