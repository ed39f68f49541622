"""Prometheus metrics that cost a step next to nothing: plain numbers, made into families when scraped.

Knows no service and no HTTP. Each metric has one writer and may be scraped from another thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CollectorRegistry, Info, PlatformCollector, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

# Upper bounds of buckets. From what a GPU takes for a step to what a CPU takes for a long prompt.
SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.0025, 0.004, 0.006),
    *(0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.4, 0.6),
    *(1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 15.0, 25.0, 40.0, 60.0),
)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def new_registry(
    service: str, *, restarts: int, dropped_spans: Callable[[], int] = lambda: 0
) -> CollectorRegistry:
    """A registry with what every process has; `service` is part of all names that are the project's own."""
    registry = CollectorRegistry(auto_describe=True)  # two metrics of one name are refused
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    build = Info("specsplit_build", "The running program.", registry=registry)
    build.info({"service": service, "version": version("specsplit")})
    readings = (
        Reading("restarts", "restarts_total", "Times that a supervisor has started this service again."),
        Reading("dropped", "dropped_spans_total", "Spans of traces that were lost: too many, or not taken."),
    )
    Readings(
        registry,
        f"specsplit_{service}_",
        lambda: {"restarts": restarts, "dropped": dropped_spans()},
        readings,
    )
    return registry


class Histogram(Collector):
    """One observation may stand for many, as when one step brings several tokens."""

    def __init__(
        self, registry: CollectorRegistry, name: str, help_text: str, bounds: Sequence[float]
    ) -> None:
        self._name, self._help = name, help_text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # by bucket, not cumulated; the last one has no bound
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


class Tally(Collector):
    """A counter for each combination of label values; none is shown before it has counted."""

    def __init__(
        self, registry: CollectorRegistry, name: str, help_text: str, labels: Sequence[str] = ()
    ) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self._counts: dict[tuple[str, ...], int] = defaultdict(int, {} if labels else {(): 0})
        registry.register(self)

    def add(self, *values: str, count: int = 1) -> None:
        """`values` are those of the labels, in their order."""
        self._counts[values] += count

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, count in self._counts.copy().items():
            family.add_metric(values, count)
        yield family


class PositionTally(Collector):
    """A counter for each place in a draft, the first is 0: a draft of three tokens counts at 0, 1 and 2."""

    def __init__(
        self, registry: CollectorRegistry, name: str, help_text: str, labels: Sequence[str] = ()
    ) -> None:
        self._name, self._help, self._labels = name, help_text, (*labels, "position")
        self._by_length: dict[tuple[str, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        registry.register(self)

    def add(self, *values: str, length: int) -> None:
        """One draft of `length` tokens."""
        self._by_length[values][length] += 1

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, by_length in self._by_length.copy().items():
            counts = by_length.copy()
            for position in range(max(counts, default=0)):  # empty in the middle of the first `add`
                num_longer = sum(count for length, count in counts.items() if length > position)
                family.add_metric((*values, str(position)), num_longer)
        yield family


@dataclass(frozen=True, slots=True)
class Reading:
    """A number that is counted elsewhere under `key`: only ever growing if `name` ends in `_total`."""

    key: str
    name: str
    help_text: str
    labels: Mapping[str, str] = field(default_factory=dict)
    unit: float = 1.0
    """What one of the number is worth, such as 1e-6 for microseconds."""


class Readings(Collector):
    """Shows numbers of a mapping that is asked for when scraped; those that it does not have are left out."""

    def __init__(
        self,
        registry: CollectorRegistry,
        prefix: str,
        read: Callable[[], Mapping[str, int]],
        readings: Sequence[Reading],
    ) -> None:
        """`prefix` goes before each name. Readings of one name differ in the values of their labels."""
        self._prefix = prefix
        self._read = read
        self._readings = readings
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        numbers = self._read()
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for reading in self._readings:
            if reading.name not in families:
                kind = CounterMetricFamily if reading.name.endswith("_total") else GaugeMetricFamily
                name = self._prefix + reading.name
                families[reading.name] = kind(name, reading.help_text, labels=list(reading.labels))
            if reading.key in numbers:
                value = numbers[reading.key] * reading.unit
                families[reading.name].add_metric(list(reading.labels.values()), value)
        return families.values()
