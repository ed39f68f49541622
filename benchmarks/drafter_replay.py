"""Replays the n-gram drafter over recorded outputs: tokens per step without a model. Knows no service.

    python benchmarks/drafter_replay.py FOLDER [-k 4 8] [--min-n 2] [--max-n 5]

FOLDER holds `*.jsonl.gz` files, one object a line with `prompt_token_ids` and `generated_token_ids`. A step
drafts after all that is committed so far, accepts what equals the recorded text and commits one token more.
The first output token comes from prefill and is no step.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specsplit.drafter.ngram import NgramProposer
from specsplit.drafter.proposer import Ask, Opening
from specsplit.drafter.settings import DrafterSettings


@dataclass(slots=True)
class Tally:
    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def replay(
    proposer: NgramProposer, prompt_ids: list[int], output_ids: list[int], k: int, tally: Tally
) -> None:
    state = proposer.open(Opening([*prompt_ids, *output_ids[:1]], prompt_len=len(prompt_ids), sampling=None))
    done = 1
    while done < len(output_ids):
        granted = min(k, len(output_ids) - done - 1)
        drafted = proposer.propose([Ask(state, granted)])[0].ids if granted else ()
        num_accepted = 0
        while num_accepted < len(drafted) and drafted[num_accepted] == output_ids[done + num_accepted]:
            num_accepted += 1
        committed = output_ids[done : done + num_accepted + 1]
        proposer.extend(state, committed)
        done += len(committed)
        tally.num_steps += 1
        tally.num_tokens += len(committed)
        tally.num_drafted += len(drafted)
        tally.num_accepted += num_accepted


def read(file: Path) -> Iterator[tuple[list[int], list[int]]]:
    with gzip.open(file, "rt") as lines:
        for line in lines:
            record = json.loads(line)
            yield record["prompt_token_ids"], record["generated_token_ids"]


def time_batch(proposer: NgramProposer, *, num_rows: int, num_context: int, k: int) -> tuple[float, float]:
    """Milliseconds to take in one context, and to extend by 2 and draft for all rows (median of 50)."""
    rng = random.Random(0)
    states, opened = [], []
    for _ in range(num_rows):
        ids = [rng.randrange(300) for _ in range(num_context)]
        started = time.perf_counter()
        states.append(proposer.open(Opening(ids, prompt_len=num_context, sampling=None)))
        opened.append(time.perf_counter() - started)
    steps = []
    for _ in range(50):
        new_ids = [[rng.randrange(300), rng.randrange(300)] for _ in states]
        started = time.perf_counter()
        for state, ids in zip(states, new_ids, strict=True):
            proposer.extend(state, ids)
        proposer.propose([Ask(state, k) for state in states])
        steps.append(time.perf_counter() - started)
    return statistics.median(opened) * 1e3, statistics.median(steps) * 1e3


def main() -> None:
    defaults = {name: field.default for name, field in DrafterSettings.model_fields.items()}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--min-n", type=int, default=defaults["min_n"])
    parser.add_argument("--max-n", type=int, default=defaults["max_n"])
    arguments = parser.parse_args()
    files = sorted(arguments.folder.glob("*.jsonl.gz"))
    if not files:
        parser.error(f"no *.jsonl.gz in {arguments.folder}")
    proposer = NgramProposer(min_n=arguments.min_n, max_n=arguments.max_n)
    print("set              k  tokens/step  drafts/step  accepted/drafted")
    for file in files:
        for k in arguments.k:
            tally = Tally()
            for prompt_ids, output_ids in read(file):
                replay(proposer, prompt_ids, output_ids, k, tally)
            print(
                f"{file.name.split('.')[0]:15} {k:2}  {tally.num_tokens / tally.num_steps:11.2f}"
                f"  {tally.num_drafted / tally.num_steps:11.2f}"
                f"  {tally.num_accepted / max(tally.num_drafted, 1):16.2f}"
            )
    opened, step = time_batch(proposer, num_rows=64, num_context=4096, k=4)
    print(f"64 rows at 4096 tokens: {opened:.2f} ms to take in one context, {step:.2f} ms a step for all")


if __name__ == "__main__":
    main()
