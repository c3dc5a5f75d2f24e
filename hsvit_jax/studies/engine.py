"""The engine of the studies: a list of systems, one loop, a row for each, in a resumable folder.

All systems see the same data. The same command finds the runs that are done in the folder.
"""

import contextlib
import dataclasses
import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections

from hsvit_jax import artifacts, data, tasks, train
from hsvit_jax import config as config_lib
from hsvit_jax.models import costs
from hsvit_jax.runtime import coordination
from hsvit_jax.text import few
from hsvit_jax.train import batches, init_from, metrics, step
from hsvit_jax.train.prepare import with_teacher

_READ_BY = ("image_size", "train_size", "channels", "fit", "dir", "on_bad_image")

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class System:
    """A network and its recipe, and its place in a table of two axes.

    Attributes:
      spec: the configuration, as --config takes it.
      settings: KEY=VALUE texts.
      x, line: values of the axes, as printed.
    """

    name: str
    spec: str
    settings: tuple[str, ...] = ()
    x: str = ""
    line: str = ""

    @classmethod
    def parse(cls, text: str, *, recipe: bool = False) -> "System":
        """Parses a spec and the settings after it; its name has the `recipe` on request."""
        spec, *settings = re.split(r"\s+(?=[\w.]+=)", text.strip())  # other blanks are of paths
        short = (re.sub(r"^[\w.]*\.", "", setting) for setting in settings)
        return cls(" ".join([name_of(spec, recipe=recipe), *short]), spec, tuple(settings))

    @classmethod
    def parse_all(cls, texts: Sequence[str]) -> "list[System]":
        """Parses several; their names have the recipes if other words are equal."""
        systems = [cls.parse(text) for text in texts]
        if len({system.name for system in systems}) < len(systems):
            systems = [cls.parse(text, recipe=True) for text in texts]
        return systems


def name_of(spec: str, *, recipe: bool = False) -> str:
    """Names a system by its file and its words that are no data, and by its recipe on request."""
    place, _, argument = spec.partition(":")
    words = [word for word in map(str.strip, argument.split(",")) if word]
    common = [word for word in words if config_lib.is_word(word)]
    own = [word for word in words if word not in common or word in config_lib.SWITCHES]
    last = [config_lib.parse_argument(",".join(common))[1]] if recipe else []
    return " ".join([Path(place).stem, *own, *last])


def _row(system: System, run: train.Run, results: Sequence[train.Result]) -> Row:
    """The columns that studies choose from; accuracies are of the test split.

    Epochs and steps are means over seeds, as train.patience may end a run.
    """
    chosen = " (best on test)" * (run.config.train.select_on == "test")
    logs = [metrics.read_metrics(result.workdir / "metrics.jsonl") for result in results]
    rates = [line.get("images_per_second") for log in logs for line in log]
    steps, tests = statistics.fmean(r.step for r in results), [r.test for r in results]
    accuracies, classes = [test.accuracy for test in tests], len(tests[0].confusion_KK)
    parameters = costs.parameters(run.model)
    return {
        "name": system.name + chosen,
        "spec": " ".join([system.spec, *system.settings]),
        "x": system.x,
        "line": system.line + chosen,
        "epochs": steps / run.steps_per_epoch,
        "steps": round(steps),
        "batch": run.config.train.batch,
        "training_images": len(run.dataset.train),
        "classes": classes,
        "model": run.model,
        "parameters": parameters,
        "megabytes": 4 * parameters / 1e6,
        "flops": costs.flops(run.model),
        "images_per_second": statistics.median([r for r in rates if isinstance(r, float)] or [0.0]),
        "examples": tests[0].examples,
        "top5": statistics.fmean(test.top5 for test in tests) if classes > 5 else None,
        "accuracy": statistics.fmean(accuracies),
        "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "accuracies": accuracies,
    }


def configure(
    systems: Sequence[System], settings: Sequence[str] = (), seeds: Sequence[int | str] = (0,)
) -> dict[System, config_lib.Settings]:
    """Returns the configuration of each system, all of the same data.

    Args:
      systems: one system or more.
      settings: KEY=VALUE texts for all, before a system's own; one of them must read a `model` key.
      seeds: one run of every system for each.

    Raises:
      ValueError: a configuration is wrong; systems or seeds are named twice; data differ.
    """
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise ValueError(
            f"a system is named twice in {few(names)}: remove one or rename its file (in a study: "
            "its x or line)"
        )
    configs = {system: _config(system, [*settings, *system.settings]) for system in systems}
    for config in configs.values():
        tasks.refuse_others(config, "a comparison")
    first = next(iter(configs.values()))
    seeded = {config_lib.override(first, [f"seed={seed}"]).seed for seed in seeds}
    if not seeds or len(seeded) < len(seeds):
        raise ValueError(f"--seeds needs different whole numbers; got {','.join(map(str, seeds))}")
    _check_equal(configs, "data.name data.val_fraction data.fraction")
    for key in (text.partition("=")[0] for text in settings if text.startswith("model.")):
        complaints = [_unread(config, key) for config in configs.values()]
        if all(complaints):
            raise complaints[0]
    return configs


def train_all(
    systems: Sequence[System],
    out: Path,
    settings: Sequence[str] = (),
    seeds: Sequence[int | str] = (0,),
    equal: str = "length",
) -> list[Row]:
    """Trains the systems that are not trained yet, each with every seed.

    Args:
      systems, settings, seeds: as in `configure`.
      out: the runs' parent folder.
      equal: 'length' refuses unequal epochs, steps or batches. 'compute' sets the steps of the
        others by the first one's images times its FLOPs. 'data' checks the data alone.

    Returns:
      a row for each system, without those whose training diverged: see `refuse_left_out`.

    Raises:
      Diverged: every system diverged.
      ValueError: trainings have unequal lengths, two systems share a folder, or as `configure` and
        `hsvit_jax.train.train`.
    """
    configs = configure(systems, settings, seeds)
    given = {system: [*settings, *system.settings] for system in configs}
    loaded: dict[tuple, data.Dataset] = {}
    runs = {system: _prepare(system, config, loaded) for system, config in configs.items()}
    if equal == "length":  # the number of images may have decided it
        prepared = {system: run.config for system, run in runs.items()}
        _check_equal(prepared, "train.epochs train.steps train.batch")
    if equal == "compute":
        of_a_step = [run.config.train.batch * costs.flops(run.model) for run in runs.values()]
        budget = next(iter(runs.values())).total_steps * of_a_step[0]
        for system, cost in zip(runs, of_a_step, strict=True):
            given[system] += [f"train.steps={max(round(budget / cost), 1)}", "train.epochs=0"]
            configs[system] = _config(system, given[system])
            runs[system] = _prepare(system, configs[system], loaded)
    folders = {config_lib.default_workdir(c, s.spec, given[s]) for s, c in configs.items()}
    if equal != "data" and len(folders) < len(configs):
        names = few(system.name for system in configs)
        raise ValueError(f"{names}: two of them name one run's folder; remove one")
    rows, diverged = [], None
    for system, config in configs.items():
        results = []
        for seed in seeds:
            seeded = config_lib.override(config, [f"seed={seed}"])
            folder = out / Path(config_lib.default_workdir(seeded, system.spec, given[system])).name
            coordination.print_once(f"{system.name}, seed {seed}: {folder}")
            dataset = images(seeded, loaded)
            try:
                results.append(train.train(seeded, folder, dataset=dataset, as_begun=True))
            except train.Diverged as error:
                diverged = error
                coordination.print_once(f"{system.name}, seed {seed} is skipped: {error}")
                break
        else:
            rows.append(_row(system, runs[system], results))
    if diverged and not rows:
        raise diverged
    return rows


def learning_curves(
    systems: Sequence[System],
    out: Path,
    fractions: Sequence[float],
    settings: Sequence[str] = (),
    seeds: Sequence[int | str] = (0,),
) -> list[Row]:
    """Trains the systems on shares of the training images, at equal compute for each share.

    Args:
      fractions: shares of each class's training images, above 0 and at most 1.
      systems, out, settings, seeds: as in `train_all`.

    Returns:
      a row for each system and share; its x is the number of training images per class.
    """
    rows = []
    for fraction in fractions:
        given = [*settings, f"data.fraction={fraction:g}"]
        for row in train_all(systems, out, given, seeds, "compute"):
            per_class = row["training_images"] / row["classes"]
            rows.append({**row, "x": f"{per_class:g}", "line": row["name"]})
    return rows


def refuse_left_out(wanted: int, got: int) -> None:
    """Raises Diverged, after everything is written, if a training was skipped."""
    if got < wanted:
        raise train.Diverged(
            f"{wanted - got} of {wanted} are missing, as their training diverged; the same command "
            "keeps the others"
        )


def images(config: ml_collections.ConfigDict, loaded: dict[tuple, data.Dataset]) -> data.Dataset:
    """Returns a system's data set; systems that read their images in one way share it."""
    config = init_from.with_weights(config)
    key = tuple(config.data[k] for k in _READ_BY)
    if key not in loaded:
        loaded[key] = train.load_data(config, training=True)
    return loaded[key]


def steps(run: train.Run, start: Any, **changes: Any) -> Iterator[tuple[dict, dict]]:
    """Yields the state and the values of each step of a run that writes nothing.

    Args:
      start: the start of `resume.start`.
      changes: attributes of the run, such as another optimizer.
    """
    run = dataclasses.replace(run, **changes)
    shape = jax.eval_shape(lambda: step.init_state(run.model, run.tx, run.config))
    run = dataclasses.replace(run, state_shape=shape)
    run = with_teacher(run)
    state, train_step = step.first_state(run, start), step.jit_step(run)
    for batch in itertools.islice(batches.source(run, 0), run.total_steps):
        state, values = train_step(state, batch, *run.lessons)
        yield state, values


def save(
    rows: Sequence[Row], columns: str, folder: Path, name: str, page: str, figure: Any
) -> list[Path]:
    """Writes a text as NAME.md, columns of the rows as NAME.csv and a figure as NAME.png."""
    paths = [folder / f"{name}.{kind}" for kind in ("md", "csv", "png")]
    head = columns.split()
    cells = [
        [" ".join(map(str, x)) if isinstance(x, list | tuple) else x for x in map(row.get, head)]
        for row in rows
    ]
    artifacts.write_file(paths[0], page)
    artifacts.save_csv(paths[1], [head, *cells])
    artifacts.save_figure(figure, paths[2])
    return paths


def seeds_text(rows: Sequence[Row]) -> str:
    """Counts the seeds and explains the spread."""
    seeds = len(rows[0]["accuracies"])
    return f"{seeds} seeds, ± one standard deviation over them" if seeds > 1 else "1 seed"


def accuracy_text(row: Row) -> str:
    """Formats the mean over seeds, its standard deviation, and the interval of few images."""
    spread = f" ± {100 * row['deviation']:.2f}" if len(row["accuracies"]) > 1 else ""
    return artifacts.accuracy_text(row["accuracy"], row["examples"], spread)


def _config(system: System, settings: Sequence[str]) -> config_lib.Settings:
    """A system's configuration; a shared `model` setting may apply to other systems only."""
    with _named(system):
        config = config_lib.get_config(system.spec, *settings)
    own = {setting.partition("=")[0] for setting in system.settings}
    others = {key for key in config.user if key.startswith("model.") and key not in own}
    others = {key for key in others if _unread(config, key)}
    return config.with_user({k: v for k, v in config.user.items() if k not in others})


def _unread(config: config_lib.Settings, key: str) -> ValueError | None:
    """The refusal of a key without effect."""
    try:
        config_lib.refuse_unread(config, (key,))
    except ValueError as error:
        return error
    return None


def _prepare(system: System, config: ml_collections.ConfigDict, loaded: dict) -> train.Run:
    with _named(system):
        return train.prepare(config, dataset=images(config, loaded))


@contextlib.contextmanager
def _named(system: System) -> Iterator[None]:
    """Puts the system's name before an error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{system.name}: {error}") from error


def _check_equal(configs: Mapping[System, ml_collections.ConfigDict], keys: str) -> None:
    """Raises ValueError unless all configurations have one value of each key."""
    for section, name in (key.split(".") for key in keys.split()):
        values = {system.name: config[section][name] for system, config in configs.items()}
        if len(set(values.values())) > 1:
            each = ", ".join(f"{system} has {value}" for system, value in values.items())
            raise ValueError(f"systems need one {section}.{name}, but {each}: set it for all")
