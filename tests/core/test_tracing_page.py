"""docs/tracing.md names every attribute that a service puts on a span, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (
    "gateway/specsplit/gateway/tracing.py",
    "verifier/specsplit/verifier/tracing.py",
    "drafter/specsplit/drafter/service.py",
)
ATTRIBUTE = r"(?:gen_ai|specsplit|error)\.[a-z_]+(?:\.[a-z_]+)*"


def test_the_page_says_exactly_what_there_is() -> None:
    used = {
        name for source in SOURCES for name in re.findall(rf'"({ATTRIBUTE})":', (ROOT / source).read_text())
    }
    used |= set(re.findall(rf'\["({ATTRIBUTE})"\] =', (ROOT / SOURCES[0]).read_text()))
    assert len(used) > 40
    assert set(re.findall(rf"`({ATTRIBUTE})`", (ROOT / "docs/tracing.md").read_text())) == used
