"""Rows of measurements as text: a table for a README, and a CSV file."""

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown: its head and, as words, its cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_csv(rows: Sequence[Any], path: Path) -> None:
    """Dataclass instances of one kind, at least one, a column for each field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(rows[0])])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
