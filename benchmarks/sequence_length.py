"""Measures what mixing tokens costs as the sequence grows, for a ViX with each mixer.

    python benchmarks/sequence_length.py --batch=64 --out=docs/benchmarks/sequence

What the ViX paper claims of its mixers in sections 2 and 3, as FLOPs and peak memory of programs
that are compiled for the back end at hand and never executed.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import tables

from hsvit_jax import artifacts
from hsvit_jax.models import costs
from hsvit_jax.models.vix import mixer_config, vix


@dataclasses.dataclass(frozen=True)
class Row:
    """Costs of one network for images of `tokens` patches, without the CLS token.

    forward_flops, training_flops: of one image, in matrix products and convolutions. forward_bytes,
    training_bytes: peaks at `batch` images, arguments and results included.
    """

    mixer: str
    tokens: int
    batch: int
    parameters: int
    forward_flops: float
    training_flops: float
    forward_bytes: int
    training_bytes: int


def measure(mixer: str, tokens: int, batch: int, **settings: Any) -> Row:
    """Compiles a ViX for images whose pixels are its patches.

    Args:
        tokens: pixels of an image, a power of two.
        batch: images of the programs.
        **settings: of a `model` section, where they differ from the paper's, such as embed_dim.

    Raises:
        ValueError: a mixer that is unknown or does not fit.
    """
    model = _network(mixer, tokens, **settings)
    return Row(
        mixer=mixer,
        tokens=tokens,
        batch=batch,
        parameters=costs.parameters(model),
        forward_flops=costs.computed_flops(model),
        training_flops=costs.training_flops(model),
        forward_bytes=costs.forward_bytes(model, batch),
        training_bytes=costs.training_bytes(model, batch),
    )


def _network(mixer: str, tokens: int, **settings: Any) -> vix.ViX:
    rows = 1 << (isqrt(tokens).bit_length() - 1)
    return vix.FAMILY.build(
        {**vix.FAMILY.defaults, **settings, "mixer": mixer, "patch": 1},
        image_size=(rows, tokens // rows),
        channels=3,
        num_classes=10,
    )


def table(rows: Sequence[Row]) -> list[tuple]:
    """Returns a head and a row for each mixer and length, with memory relative to softmax."""
    softmax = {row.tokens: row.training_bytes for row in rows if row.mixer == "softmax"}

    def share(row: Row) -> str:
        known = row.tokens in softmax
        return f"{row.training_bytes / softmax[row.tokens]:.2f}" if known else "–"

    columns = {
        "mixer": lambda row: row.mixer,
        "tokens": lambda row: f"{row.tokens:,}",
        "parameters": lambda row: f"{row.parameters:,}",
        "forward, GFLOP": lambda row: f"{row.forward_flops / 1e9:.3f}",
        "training, GFLOP": lambda row: f"{row.training_flops / 1e9:.3f}",
        "forward, MiB": lambda row: f"{row.forward_bytes / 2**20:,.0f}",
        "training, MiB": lambda row: f"{row.training_bytes / 2**20:,.0f}",
        "of softmax's": share,
    }
    return artifacts.table(columns, rows)


def write(rows: Sequence[Row], folder: Path) -> tuple[Path, Path]:
    """Writes `sequence.csv` and `sequence.png` into `folder`, and creates it."""
    return tables.write(rows, folder, "sequence", lambda figure: _draw(rows, figure), (11, 8))


def _draw(rows: Sequence[Row], figure: Any) -> None:
    """Draws four curves a mixer; linear ones have the slope of the grey line."""
    panels = (
        ("forward_flops", 1e9, "GFLOP an image", "Forward: work"),
        ("training_flops", 1e9, "GFLOP an image", "Training: work"),
        ("forward_bytes", 2**30, "GiB", f"Forward: memory, batch {rows[0].batch}"),
        ("training_bytes", 2**30, "GiB", f"Training: memory, batch {rows[0].batch}"),
    )
    lengths = sorted({row.tokens for row in rows})
    for axes, (key, unit, label, title) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for mixer in dict.fromkeys(row.mixer for row in rows):
            points = [(r.tokens, getattr(r, key) / unit) for r in rows if r.mixer == mixer]
            axes.plot(*zip(*points, strict=True), marker=".", label=mixer)
        low = min(getattr(r, key) for r in rows if r.tokens == lengths[0]) / unit
        tables.double_log(axes, (lengths, [low * n / lengths[0] for n in lengths]), "linear")
        axes.set(xlabel="tokens", ylabel=label, title=title, xticks=lengths)


def main() -> None:
    """Prints the table, and writes it with its plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="256,512,1024,2048,4096", help="powers of two")
    parser.add_argument("--mixers", default=",".join(mixer_config.NAMES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", default="sequence")
    given = parser.parse_args()
    rows = []
    for mixer in given.mixers.split(","):
        for tokens in map(int, given.tokens.split(",")):
            rows.append(measure(mixer, tokens, given.batch))
            print(f"{mixer}, {tokens:,} tokens", file=sys.stderr)
    print(artifacts.markdown(table(rows)))
    print(*write(rows, Path(given.out)), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
