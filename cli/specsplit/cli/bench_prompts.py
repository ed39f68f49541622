"""The prompts of `specsplit bench`: some whose answers copy the prompt, some whose answers do not."""

from __future__ import annotations

_CODE = """def read_settings(path):
    settings = {}
    with open(path) as handle:
        for number, line in enumerate(handle, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, separator, value = line.partition("=")
            if not separator:
                raise ValueError(f"{path}:{number}: expected name=value")
            settings[name.strip()] = value.strip()
    return settings
"""

_MINUTES = (
    "The harbour council met on Tuesday. The chair reported that the north pier would be closed from the "
    "third of May to the ninth of June while its pilings are replaced. The treasurer said that the repair "
    "had been budgeted at forty thousand and would cost thirty-six thousand. The pilot office asked for two "
    "more radios, which was granted. The next meeting is on the fourteenth of June at six in the evening."
)

_TABLE = (
    "name,berth,length,cargo\nAurora,4,82,timber\nBoreas,7,61,grain\nCalypso,2,120,containers\n"
    "Doris,9,44,fish\nEurydice,1,97,cement\nFlora,5,58,salt\nGalatea,3,73,timber\nHelios,8,66,grain\n"
)

COPY_HEAVY = (
    f"Repeat the following Python function exactly, without any change:\n\n{_CODE}",
    f"Rename the variable `settings` to `options` and print the whole function again:\n\n{_CODE}",
    f"Copy these minutes word for word:\n\n{_MINUTES}",
    f"Answer with full sentences quoted from the text. What was decided about the pier, the repair and the "
    f"radios?\n\n{_MINUTES}",
    f"Print this table again as it is:\n\n{_TABLE}",
    f"Print the rows of this table whose cargo is timber or grain, then the whole table again:\n\n{_TABLE}",
)

FREE = (
    "Why is the sky blue?",
    "Write a short story about a fox who learns to sail.",
    "Explain to a child what a prime number is.",
    "Give advice to somebody who moves to a new city.",
)
