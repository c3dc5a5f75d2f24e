"""Costs of mixing tokens as the sequence grows: `hsvit sequence-length`.

What the ViX paper claims of its mixers in sections 2 and 3, as FLOPs and peak memory of programs
that are compiled for the back end at hand and never executed.
"""

import dataclasses
from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import Any

from hsvit_jax import cli, report
from hsvit_jax.models import costs
from hsvit_jax.models.vix import mixer_config, vix


@dataclasses.dataclass(frozen=True)
class Row:
    """The costs of one network, for images of `tokens` patches (a CLS comes besides).

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
        {**vix.DEFAULTS, **settings, "mixer": mixer, "patch": 1},
        image_size=(rows, tokens // rows),
        channels=3,
        num_classes=10,
    )


def table(rows: Sequence[Row]) -> list[tuple]:
    """The head, then a line for each mixer and length, with training memory relative to softmax."""
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
    return report.table(columns, rows)


def write(rows: Sequence[Row], folder: Path) -> tuple[Path, Path]:
    """Writes `sequence.csv` and `sequence.png` into `folder`, which is made."""
    return report.write(rows, folder, "sequence", lambda figure: _draw(rows, figure), (11, 8))


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
        report.double_log(axes, (lengths, [low * n / lengths[0] for n in lengths]), "linear")
        axes.set(xlabel="tokens", ylabel=label, title=title, xticks=lengths)


def run(request: cli.Request) -> None:
    """Measures what the command line asks for; prints and writes the table."""
    values = request.flags
    if unknown := set(values.mixers) - set(mixer_config.NAMES):
        raise cli.Misuse(f"unknown --mixers {sorted(unknown)}; choose of {mixer_config.NAMES}")
    numbers = [int(word) if word.isdecimal() else 0 for word in values.tokens] or [0]
    if not all(n >= 2 and n & (n - 1) == 0 for n in numbers):
        given = ",".join(values.tokens)
        raise cli.Misuse(f"--tokens needs powers of two, from 2; got {given!r}")
    pairs = [(mixer, n) for mixer in values.mixers or mixer_config.NAMES for n in numbers]
    for mixer, tokens in pairs:  # before the work, as it may fail
        try:
            _network(mixer, tokens)
        except ValueError as error:
            raise cli.Misuse(f"--mixers={mixer} cannot have --tokens={tokens}: {error}") from error
    report.make_folder(Path(values.out))
    rows = []
    for mixer, tokens in pairs:
        rows.append(measure(mixer, tokens, values.batch))
        cli.note(f"{mixer}, {tokens:,} tokens")
    print(report.markdown(table(rows)))
    cli.note("\n".join(map(str, write(rows, Path(values.out)))))
