"""Reads what /metrics says, checks it as a linter of Prometheus metrics would, and knows docs/metrics.md."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_ROW = re.compile(r"^\| `(specsplit_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", re.MULTILINE)
Described = dict[str, tuple[str, tuple[str, ...], str]]  # by name: type, labels, meaning


class Everything(dict[str, int]):
    """Counters in which every key is found."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> int:
        return 1


class Scraped:
    """Samples of one scrape; making it checks the text."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }
        headers = Counter(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))
        assert set(headers.values()) == {1}, headers
        assert len(self._samples) == sum(len(family.samples) for family in self.families), "a series twice"
        for family in self.families:
            _check(family)

    def __call__(self, name: str, **labels: str) -> float:
        """Value of one series; 0 when it is not there."""
        return self._samples.get((name, frozenset(labels.items())), 0.0)

    @property
    def described(self) -> Described:
        """Of the project's own metrics."""
        return {
            _exposed(family): (
                family.type,
                tuple(sorted({label for sample in family.samples for label in sample.labels} - {"le"})),
                family.documentation,
            )
            for family in self.families
            if family.name.startswith("specsplit_")
        }

    @property
    def without_samples(self) -> set[str]:
        return {_exposed(family) for family in self.families if not family.samples}


def scrape(address: str) -> Scraped:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        return Scraped(response.read().decode())


def read(registry: CollectorRegistry) -> Scraped:
    return Scraped(generate_latest(registry).decode())


def documented(service: str) -> Described:
    """What the page says of one service, and of all."""
    return {
        name: (kind, tuple(sorted(re.findall(r"`(\w+)`", labels))), meaning)
        for name, kind, labels, meaning in _ROW.findall(PAGE.read_text())
        if name.startswith((f"specsplit_{service}_", "specsplit_build_"))
    }


def _exposed(family: Metric) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def _check(family: Metric) -> None:
    assert family.documentation, family.name
    name = _exposed(family)
    assert re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", name), name
    assert not re.search("_(ms|us|ns|micro|milli|minutes|hours)", name), f"{name}: not a base unit"
    if family.type == "counter":
        assert all(sample.name == name for sample in family.samples), name
    else:
        assert not name.endswith(("_total", "_count", "_sum", "_bucket")), name
    if family.type == "histogram":
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        assert buckets[-1].labels["le"] == "+Inf"
        values = [sample.value for sample in buckets]
        assert values == sorted(values), f"{name}: not cumulative"
