"""Several systems on the same data by the same loop: `hsvit compare SPEC SPEC ...`.

Each system is trained once for every seed (or found trained in its folder, and only evaluated) and
becomes a row of one table: parameters, FLOPs, memory, speed, accuracy. Written as Markdown, CSV and
a plot, in the manner of figure 2 of the HSViT paper and figure 4 of the ViX paper.
"""

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections

from hsvit_jax import cli, report, train
from hsvit_jax import config as config_lib
from hsvit_jax.models import costs
from hsvit_jax.train import metrics


@dataclasses.dataclass(frozen=True)
class Row:
    """One system: the size of its network, the cost of its programs, its accuracy.

    Attributes:
      flops: of one image forward, 2·MAC.
      forward_bytes, training_bytes: peaks of the compiled programs at `batch` images.
      images_per_second: median of the training log of all seeds.
      examples: of the test split.
      accuracies: on it, one for each seed.
    """

    name: str
    spec: str
    epochs: float
    parameters: int
    flops: int
    batch: int
    forward_bytes: int
    training_bytes: int
    images_per_second: float
    examples: int
    accuracies: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds; 0 for a single one."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


def compare(
    specs: Sequence[str],
    out: Path,
    *,
    settings: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    batch: int = 64,
    verbose: bool = True,
) -> list[Row]:
    """Trains the systems that are not trained yet, after all checks, and evaluates them.

    Args:
      specs: configurations, as --config takes them.
      out: the folder of all runs.
      settings: KEY=VALUE texts for every configuration.
      seeds: one run of every system for each.
      batch: images of the programs whose memory is stated.
      verbose: print progress.

    Returns:
      a row for each system, best accuracy first.

    Raises:
      ValueError: configurations are wrong, equal or of different data; also as
        `hsvit_jax.train.train`.
    """
    configs = {spec: config_lib.get_config(spec, *settings) for spec in specs}
    _check(configs, specs, seeds)
    first = next(iter(configs.values()))
    dataset = train.load_data(first)
    prepared = {}
    for spec, config in configs.items():
        try:
            prepared[spec] = train.prepare(config, dataset=_at_size(dataset, config))
        except ValueError as error:
            raise ValueError(f"{spec}: {error}") from error
    rows = []
    for spec, config in configs.items():
        results, rates = [], []
        for seed in seeds:
            config = config_lib.override(config, [f"seed={seed}"])
            folder = out / Path(config_lib.default_workdir(config, spec, settings)).name
            if verbose:
                print(f"{name_of(spec)}, seed {seed}: {folder}", file=sys.stderr, flush=True)
            results.append(
                train.train(config, folder, dataset=_at_size(dataset, config), verbose=verbose)
            )
            lines = metrics.read_metrics(folder / "metrics.jsonl")
            rates += [line["images_per_second"] for line in lines if "images_per_second" in line]
        model = prepared[spec].model
        rows.append(
            Row(
                name=name_of(spec),
                spec=spec,
                epochs=prepared[spec].config.train.epochs,
                parameters=costs.parameters(model),
                flops=costs.flops(model),
                batch=batch,
                forward_bytes=costs.forward_bytes(model, batch),
                training_bytes=costs.training_bytes(model, batch),
                images_per_second=statistics.median(rates) if rates else 0.0,
                examples=results[0].test.examples,
                accuracies=tuple(result.test.accuracy for result in results),
            )
        )
    return sorted(rows, key=lambda row: -row.accuracy)


def _check(
    configs: dict[str, ml_collections.ConfigDict], specs: Sequence[str], seeds: Sequence[int]
) -> None:
    """Raises ValueError unless all systems are trained on the same data for the same time."""
    if len(configs) < len(specs):
        raise ValueError(f"a system is named twice in {' '.join(specs)}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds needs different whole numbers; got {','.join(map(str, seeds))}")
    for key in ("name", "val_fraction"):
        values = {spec: config.data[key] for spec, config in configs.items()}
        if len(set(values.values())) > 1:
            names = ", ".join(f"{spec} has {value}" for spec, value in values.items())
            raise ValueError(f"systems are compared on the same data, but of data.{key} {names}")
    lengths = {spec: (c.train.epochs, c.train.steps, c.train.batch) for spec, c in configs.items()}
    if len(set(lengths.values())) > 1:
        runs = ", ".join(f"{spec} {e:g}/{s}/{b}" for spec, (e, s, b) in lengths.items())
        raise ValueError(
            f"systems are compared after equal training, but train.epochs/steps/batch are: {runs}; "
            "set them for all with --config.train.epochs=... and --config.train.batch=..."
        )


def _at_size(dataset: Any, config: ml_collections.ConfigDict) -> Any:
    """The data set, loaded again for a system that reads another image size."""
    size = tuple(config.data.image_size)
    size = size * 2 if len(size) == 1 else size
    if size and size != tuple(dataset.info.image_size):
        return train.load_data(config)
    return dataset


def name_of(spec: str) -> str:
    """A system's name in the table: its file, and the words that are no data or recipe."""
    place, _, argument = spec.partition(":")
    words = [Path(place).stem]
    for word in filter(None, (w.strip() for w in argument.split(","))):
        if not config_lib.is_word(word) or word in config_lib.SWITCHES:
            words.append(word)
    return " ".join(words)


COLUMNS = (
    "system",
    "parameters",
    "FLOPs",
    "memory forward",
    "memory training",
    "images/s",
    "test accuracy",
)


def table(rows: Sequence[Row]) -> str:
    """Formats the rows as Markdown."""
    seeds = len(rows[0].accuracies)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    for row in rows:
        cells = (
            row.name,
            f"{row.parameters:,}",
            f"{row.flops / 1e9:.3f} G",
            report.byte_text(row.forward_bytes),
            report.byte_text(row.training_bytes),
            f"{row.images_per_second:,.0f}",
            report.accuracy_text(
                row.accuracy, row.examples, f" ± {100 * row.deviation:.2f}" if seeds > 1 else ""
            ),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(rows: Sequence[Row], out: Path, command: str) -> list[Path]:
    """Writes comparison.md, comparison.csv and comparison.png in `out`; returns their paths."""
    paths = [out / f"comparison.{kind}" for kind in ("md", "csv", "png")]
    seeds, batch = len(rows[0].accuracies), rows[0].batch
    notes = (
        f"{rows[0].epochs:g} epochs, {seeds} seed{'s' if seeds > 1 else ''}"
        f"{', ± one standard deviation over them' if seeds > 1 else ''}. FLOPs: one image forward, "
        f"2·MAC. Memory: peak of the compiled program, batch {batch}. images/s: median of the "
        f"training log, {jax.default_backend()}, {jax.device_count()} device(s).\n\n    {command}\n"
    )
    report.write_file(paths[0], f"{table(rows)}\n{notes}")
    names = [field.name for field in dataclasses.fields(Row)]
    cells = [[*names[:-1], "accuracy", "deviation", names[-1]]]
    for row in rows:
        values = [getattr(row, name) for name in names]
        every = " ".join(map(str, row.accuracies))
        cells.append([*values[:-1], row.accuracy, row.deviation, every])
    report.save_csv(paths[1], cells)
    _draw(rows, paths[2])
    return paths


def _draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy against each of the three costs, one colour and letter for each system."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    figure = Figure(figsize=(13, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    costs = (
        ("parameters", "parameters"),
        ("flops", "FLOPs of one image forward"),
        ("training_bytes", f"bytes of a training program, batch {rows[0].batch}"),
    )
    panels = figure.subplots(1, len(costs), sharey=True)
    colours = colormaps["tab20"].colors
    markers = "os^Dv"
    for panel, (field, label) in zip(panels, costs, strict=True):
        for i, row in enumerate(rows):
            panel.errorbar(
                getattr(row, field),
                100 * row.accuracy,
                yerr=100 * row.deviation or None,
                marker=markers[i // len(colours) % len(markers)],
                color=colours[i % len(colours)],
                linestyle="none",
                capsize=3,
                label=f"{row.name}: {row.accuracy:.2%}",
            )
        spread = [getattr(row, field) for row in rows]
        wide = max(spread) > 5 * min(spread)  # else a logarithmic axis may have no tick to show
        panel.set(xlabel=label, xscale="log" if wide else "linear")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 3)) if wide else MaxNLocator(4))
        panel.xaxis.set_major_formatter(EngFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="test accuracy (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    report.save_figure(figure, path)


def run(request: cli.Request) -> None:
    """Trains and compares the systems that the words name; prints and writes the table."""
    values = request.flags
    if not request.words:
        raise cli.Misuse("no system is named")
    if request.spec:
        raise cli.Misuse(f"compare does not use --config: name {request.spec} as a word")
    if not all(seed.strip().isdecimal() for seed in values.seeds):
        raise cli.Misuse(f"--seeds needs whole numbers; got {','.join(values.seeds)}")
    out, seeds = Path(values.out), [int(seed) for seed in values.seeds]
    settings = request.settings
    rows = compare(request.words, out, settings=settings, seeds=seeds, batch=values.batch)
    print(table(rows), *write(rows, out, request.line), sep="\n")
