"""What `specsplit status` has found, as tables on the terminal. Asks nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from specsplit.core.registry.overview import RegisteredReplica

_OF_A_REPLICA = ("up", "requests", "free_blocks", "prompt_tokens", "predicted_cached_tokens", "cached_tokens")
_Counters = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Service:
    """A service to ask: where it is and what the supervisor, if there is one, says of it."""

    name: str
    role: str
    address: str | None
    pid: str = ""
    state: str = ""
    restarts: str = ""


@dataclass(frozen=True, slots=True)
class Registry:
    """What the registry holds, by namespace; None when it does not answer, and `error` says why."""

    replicas: Mapping[bytes, Sequence[RegisteredReplica]] | None
    error: str = ""


def show(
    services: Sequence[Service], counters: Sequence[_Counters | None], registry: Registry | None
) -> None:
    """`counters` in the order of `services`; None where one does not answer."""
    console = Console()
    if services:
        console.print(_services(services, counters))
    verifiers = [service.address or "" for service in services if service.role == "verifier"]
    for service, counted in zip(services, counters, strict=True):
        if service.role == "gateway" and counted is not None:
            console.print(_routing(service.name, verifiers, counted))
    if registry is None:
        return
    if registry.replicas is None:
        console.print(f"The registry does not answer: {registry.error}", markup=False, highlight=False)
    else:
        console.print(_registered(registry.replicas))


def _services(services: Sequence[Service], counters: Sequence[_Counters | None]) -> Table:
    table = Table("service", "pid", "state", "restarts", "address", "counters")
    for service, counted in zip(services, counters, strict=True):
        shown = "no answer"
        if counted is not None:
            shown = ", ".join(
                f"{name} {value}" for name, value in counted.items() if not name.startswith("replica_")
            )
        table.add_row(
            service.name, service.pid, service.state, service.restarts, service.address or "", shown
        )
    return table


def _routing(gateway: str, verifiers: Sequence[str], counted: _Counters) -> Table:
    """What the gateway sent where, and how many of the prompt tokens it expected, and found, cached there."""
    routed = ", ".join(f"{counted.get(f'routed_by_{by}', 0)} by {by}" for by in ("registry", "memory"))
    table = Table(
        *("replica", "up", "requests", "free blocks", "prompt tokens", "hits predicted", "hits real"),
        title=f"{gateway}: routed {routed}",
    )
    num_replicas = sum(name.startswith("replica_") and name.endswith("_up") for name in counted)
    for index in range(num_replicas):
        name = verifiers[index] if len(verifiers) == num_replicas else f"verifier {index}"
        table.add_row(name, *(str(counted.get(f"replica_{index}_{what}", "?")) for what in _OF_A_REPLICA))
    return table


def _registered(replicas: Mapping[bytes, Sequence[RegisteredReplica]]) -> Table:
    table = Table("namespace", "replica", "incarnation", "state", "blocks", "seq", title="the registry")
    for namespace, members in replicas.items():
        for replica in members:
            table.add_row(
                *(namespace.hex(), replica.address, replica.incarnation.hex()[:8]),
                *(replica.state, str(replica.num_blocks), str(replica.seq)),
            )
    return table
