"""The engine of the studies: a list of systems, one loop, a row for each, in a resumable folder.

A study names its systems and its columns. All systems see the same data. A run that is done is
found again in the folder.
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

from hsvit_jax import artifacts, data, train
from hsvit_jax import config as config_lib
from hsvit_jax.models import costs
from hsvit_jax.runtime import coordination
from hsvit_jax.text import few
from hsvit_jax.train import batches, init_from, metrics, step


@dataclasses.dataclass(frozen=True)
class System:
    """A network and its recipe, and its place in a table of two axes.

    Attributes:
      spec: as --config takes it.
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
        """Reads a spec and the settings that follow it, separated by blanks.

        A blank that no KEY= follows is part of a path.

        Args:
          recipe: whether the name says the recipe.
        """
        spec, *settings = re.split(r"\s+(?=[\w.]+=)", text.strip())
        short = (re.sub(r"^[\w.]*\.", "", setting) for setting in settings)
        return cls(" ".join([name_of(spec, recipe=recipe), *short]), spec, tuple(settings))

    @classmethod
    def parse_all(cls, texts: Sequence[str]) -> "list[System]":
        """Reads several; their names say the recipes where other words are the same."""
        systems = [cls.parse(text) for text in texts]
        if len({system.name for system in systems}) < len(systems):
            systems = [cls.parse(text, recipe=True) for text in texts]
        return systems


def name_of(spec: str, *, recipe: bool = False) -> str:
    """Names a system in the table: its file and the words that are no data; the recipe if asked."""
    place, _, argument = spec.partition(":")
    words = [word for word in map(str.strip, argument.split(",")) if word]
    common = [word for word in words if config_lib.is_word(word)]
    own = [word for word in words if word not in common or word in config_lib.SWITCHES]
    last = [config_lib.parse_argument(",".join(common))[1]] if recipe else []
    return " ".join([Path(place).stem, *own, *last])


@dataclasses.dataclass(frozen=True)
class Trained:
    """A system, how it was prepared, and the result of each seed."""

    system: System
    run: train.Run
    results: tuple[train.Result, ...]


def row(one: Trained, **more: Any) -> dict[str, Any]:
    """Returns the columns that studies choose from, and `more`; accuracies are of the test split.

    Lengths are means over seeds, as train.patience may have ended a run.
    """
    system, run, results = one.system, one.run, one.results
    chosen = " (best on test)" * (run.config.train.select_on == "test")
    logs = [metrics.read_metrics(result.workdir / "metrics.jsonl") for result in results]
    rates = [line.get("images_per_second") for log in logs for line in log]
    steps, tests = statistics.fmean(r.step for r in results), [r.test for r in results]
    accuracies, classes = [test.accuracy for test in tests], len(tests[0].confusion_KK)
    return {
        "name": system.name + chosen,
        "spec": " ".join([system.spec, *system.settings]),
        "x": system.x,
        "line": system.line + chosen,
        "epochs": steps / run.steps_per_epoch,
        "steps": round(steps),
        "batch": run.config.train.batch,
        "training_images": len(run.dataset.train),
        "parameters": costs.parameters(run.model),
        "megabytes": 4 * costs.parameters(run.model) / 1e6,
        "flops": costs.flops(run.model),
        "images_per_second": statistics.median([r for r in rates if isinstance(r, float)] or [0.0]),
        "examples": tests[0].examples,
        "top5": statistics.fmean(test.top5 for test in tests) if classes > 5 else None,
        "accuracy": statistics.fmean(accuracies),
        "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "accuracies": accuracies,
        **more,
    }


def configure(
    systems: Sequence[System], settings: Sequence[str] = (), seeds: Sequence[int | str] = (0,)
) -> dict[System, ml_collections.ConfigDict]:
    """Returns the configuration of each system, all of the same data.

    Args:
      systems: one at least.
      settings: KEY=VALUE texts for every configuration, before a system's own. A key of the section
        model needs to be read by one of them.
      seeds: one run of every system for each.

    Raises:
      ValueError: a configuration is wrong; systems or seeds are named twice; data differ.
    """
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise ValueError(
            f"a system is named twice in {few(names)}: leave one out, or give "
            "another name to its file (in a study: to its x or line)"
        )
    configs = {system: _config(system, [*settings, *system.settings]) for system in systems}
    first = next(iter(configs.values()))
    seeded = {config_lib.override(first, [f"seed={seed}"]).seed for seed in seeds}
    if not seeds or len(seeded) < len(seeds):
        raise ValueError(f"--seeds needs different whole numbers; got {','.join(map(str, seeds))}")
    for key in ("name", "val_fraction", "fraction"):
        values = {system.name: config.data[key] for system, config in configs.items()}
        if len(set(values.values())) > 1:
            raise ValueError(
                f"systems are compared on the same data, but of data.{key} "
                + ", ".join(f"{name} has {value}" for name, value in values.items())
            )
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
) -> list[Trained]:
    """Trains the systems that are not trained yet, each with every seed.

    Args:
      systems, settings, seeds: of `configure`.
      equal: 'length' refuses systems of unequal epochs, steps or batches; by 'compute' the first
        one's images times its FLOPs decide how many steps the others take; 'data' asks for no more
        than equal data.

    Returns:
      the systems in their order, without those whose training diverged: see `refuse_left_out`.

    Raises:
      Diverged: of every system.
      ValueError: trainings are of unequal length, two systems name one folder, or as `configure`
        and `hsvit_jax.train.train`.
    """
    configs = configure(systems, settings, seeds)
    given = {system: [*settings, *system.settings] for system in configs}
    loaded: dict[tuple, data.Dataset] = {}
    runs = {system: _prepare(system, config, loaded) for system, config in configs.items()}
    if equal == "length":  # which the number of images may have decided
        _check_length(runs)
    if equal == "compute":
        of_a_step = {s: run.config.train.batch * costs.flops(run.model) for s, run in runs.items()}
        first = next(iter(runs))
        budget = runs[first].total_steps * of_a_step[first]
        for system in configs:
            steps = max(round(budget / of_a_step[system]), 1)
            given[system] += [f"train.steps={steps}", "train.epochs=0"]
            config = _config(system, given[system])
            configs[system], runs[system] = config, _prepare(system, config, loaded)
    folders = {s: config_lib.default_workdir(c, s.spec, given[s]) for s, c in configs.items()}
    if equal != "data" and len(set(folders.values())) < len(folders):
        names = (system.name for system in folders)
        raise ValueError(f"{few(names)}: two of them name one run's folder: leave one out")
    trained, diverged = [], None
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
                coordination.print_once(f"{system.name}, seed {seed} is left out: {error}")
                break
        else:
            trained.append(Trained(system, runs[system], tuple(results)))
    if diverged and not trained:
        raise diverged
    return trained


def refuse_left_out(wanted: int, got: int) -> None:
    """Raises Diverged, once everything is written, unless every training came to its end."""
    if got < wanted:
        raise train.Diverged(
            f"{wanted - got} of {wanted} are left out, as their training diverged: see above. The "
            "others need not be trained again"
        )


def images(config: ml_collections.ConfigDict, loaded: dict[tuple, data.Dataset]) -> data.Dataset:
    """Loads the data set as a system reads it, or returns that of a system that reads it alike."""
    config = init_from.with_weights(config)
    key = tuple(config.data[k] for k in ("image_size", "channels", "fit", "dir", "on_bad_image"))
    if key not in loaded:
        loaded[key] = train.load_data(config)
    return loaded[key]


def steps(run: train.Run, start: Any, **changes: Any) -> Iterator[tuple[dict, dict]]:
    """Yields the state and the values of each step of a run that is not written down.

    Args:
      start: of `resume.start`.
      changes: attributes of the run, such as another optimizer.
    """
    run = dataclasses.replace(run, **changes)
    shape = jax.eval_shape(lambda: step.init_state(run.model, run.tx, run.config))
    run = dataclasses.replace(run, state_shape=shape)
    state, train_step = step.first_state(run, start), step.jit_step(run)
    for batch in itertools.islice(batches.source(run, 0), run.total_steps):
        state, values = train_step(state, batch)
        yield state, values


def save(
    rows: Sequence[Mapping[str, Any]], columns: str, folder: Path, name: str, page: str, figure: Any
) -> list[Path]:
    """Writes a text as NAME.md, columns of the rows as NAME.csv and a figure as NAME.png."""
    paths = [folder / f"{name}.{kind}" for kind in ("md", "csv", "png")]
    head = [*columns.split(), "accuracy", "deviation", "accuracies"]
    cells = [[*(row[key] for key in head[:-1]), " ".join(map(str, row[head[-1]]))] for row in rows]
    artifacts.write_file(paths[0], page)
    artifacts.save_csv(paths[1], [head, *cells])
    artifacts.save_figure(figure, paths[2])
    return paths


def accuracy_text(row: Mapping[str, Any]) -> str:
    """Formats the mean over seeds, its standard deviation, and the interval of few images."""
    spread = f" ± {100 * row['deviation']:.2f}" if len(row["accuracies"]) > 1 else ""
    return artifacts.accuracy_text(row["accuracy"], row["examples"], spread)


def _config(system: System, settings: Sequence[str]) -> config_lib.Settings:
    """Returns a system's configuration. A setting of all may be for another system's network."""
    with _named(system):
        config = config_lib.get_config(system.spec, *settings)
    own = {setting.partition("=")[0] for setting in system.settings}
    others = {key for key in config.user if key.startswith("model.") and key not in own}
    others = {key for key in others if _unread(config, key)}
    return config.with_user({k: v for k, v in config.user.items() if k not in others})


def _unread(config: config_lib.Settings, key: str) -> ValueError | None:
    """Returns the refusal of a key without effect."""
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
    """Says which system a mistake is of."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{system.name}: {error}") from error


def _check_length(runs: Mapping[System, train.Run]) -> None:
    """Raises ValueError unless all runs are of the same epochs, steps and batch."""
    found = {system.name: run.config.train for system, run in runs.items()}
    lengths = {name: (x.epochs, x.steps, x.batch) for name, x in found.items()}
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{name} {e:g}/{s}/{b}" for name, (e, s, b) in lengths.items())
        raise ValueError(
            f"systems are compared after equal training, but train.epochs/steps/batch are: {each}; "
            "set them for all with --config.train.epochs=... and --config.train.batch=..."
        )
