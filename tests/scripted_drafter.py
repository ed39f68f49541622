"""A real drafter process whose proposals come from a script: the known continuation, wrong at a seeded ratio.

    python tests/scripted_drafter.py --port 0 --announce FILE --continuations FILE.json
        [--wrong-ratio R --seed S]

The JSON file holds a list of whole token sequences; a request whose tokens begin one of them is proposed its
next tokens. Whether the draft at a position is wrong depends on the seed and the position alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsplit.core.types import TokenIds
from specsplit.drafter.main import serve
from specsplit.drafter.proposer import Ask, Draft, Opening
from specsplit.drafter.settings import DrafterSettings


@dataclass(slots=True)
class Script:
    """How far a request got, and the continuations that still agree with it."""

    length: int
    agreeing: list[list[int]]


class ScriptedProposer:
    name = "scripted"

    def __init__(self, continuations: list[list[int]], *, wrong_ratio: float, seed: int) -> None:
        self._continuations = continuations
        self._wrong_ratio = wrong_ratio
        self._seed = seed

    def open(self, opening: Opening) -> Script:
        script = Script(0, self._continuations)
        self.extend(script, opening.ids)
        return script

    def extend(self, state: Script, ids: TokenIds) -> None:
        new = list(ids)
        end = state.length + len(new)
        state.agreeing = [whole for whole in state.agreeing if whole[state.length : end] == new]
        state.length = end

    def propose(self, asks: Sequence[Ask[Script]]) -> list[Draft]:
        return [self._draft(ask.state, ask.max_draft) for ask in asks]

    def _draft(self, script: Script, max_draft: int) -> Draft:
        if not script.agreeing:
            return Draft()
        known = script.agreeing[0][script.length : script.length + max_draft]
        ids = tuple(self._maybe_wrong(id_, script.length + i) for i, id_ in enumerate(known))
        return Draft(ids, confidence=(1 - self._wrong_ratio,) * len(ids))

    def _maybe_wrong(self, id_: int, position: int) -> int:
        is_wrong = random.Random(f"{self._seed}/{position}").random() < self._wrong_ratio
        if not is_wrong:
            return id_
        return id_ - 1 if id_ else 1

    def forget(self, state: Script) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--announce", type=Path)
    parser.add_argument("--continuations", type=Path, required=True)
    parser.add_argument("--wrong-ratio", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    continuations = json.loads(arguments.continuations.read_text())
    proposer = ScriptedProposer(continuations, wrong_ratio=arguments.wrong_ratio, seed=arguments.seed)
    settings = DrafterSettings(port=arguments.port, metrics_port=0, announce=arguments.announce)
    asyncio.run(serve(proposer, settings))


if __name__ == "__main__":
    main()
