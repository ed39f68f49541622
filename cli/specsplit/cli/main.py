"""The `specsplit` command: picks a subcommand and hands it the rest of the line. Knows no subcommand's flags.

Subcommands are imported only when asked for, so that `specsplit gateway` runs where torch is not installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

_SUBCOMMANDS = {
    "serve": ("specsplit.cli.serve", "run a registry, a drafter, verifiers and a gateway on this machine"),
    "gateway": ("specsplit.gateway.main", "run one gateway"),
    "drafter": ("specsplit.drafter.main", "run one drafter"),
    "verifier": ("specsplit.verifier.main", "run one verifier"),
    "generate": ("specsplit.cli.generate", "stream one reply to the terminal"),
    "bench": ("specsplit.cli.bench", "measure decoding speed"),
    "health": ("specsplit.cli.health", "tell whether one service is ready, by the exit status"),
    "status": ("specsplit.cli.status", "show the services that run and their counters"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments:
        case ["--version" | "-V"]:
            print(f"specsplit {version('specsplit')}")
            return 0
        case ["--help" | "-h" | "help"]:
            print(_usage())
            return 0
        case [name, *rest] if name in _SUBCOMMANDS:
            module, _ = _SUBCOMMANDS[name]
            status: int | None = importlib.import_module(module).main(rest)
            return status or 0
        case [name, *_]:
            print(f"{_usage()}\n\nspecsplit: error: unknown command {name!r}", file=sys.stderr)
            return 2
        case _:
            print(_usage(), file=sys.stderr)
            return 2


def _usage() -> str:
    lines = ["usage: specsplit COMMAND [FLAGS]", "       specsplit COMMAND --help", "", "commands:"]
    lines += [f"  {name:<10}{summary}" for name, (_, summary) in _SUBCOMMANDS.items()]
    lines += ["", "flags:", f"  {'--help':<10}show this text", f"  {'--version':<10}show the version"]
    return "\n".join(lines)
