"""Systems trained by one loop on the same data: for comparisons and studies."""

import dataclasses
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import ml_collections

from hsvit_jax import cli, data, train
from hsvit_jax import config as config_lib
from hsvit_jax.config import keys
from hsvit_jax.models import costs
from hsvit_jax.studies import grid
from hsvit_jax.text import few
from hsvit_jax.train import init_from, metrics


@dataclasses.dataclass(frozen=True)
class System:
    """A network and its recipe.

    Attributes:
      spec: as --config takes it.
      settings: KEY=VALUE texts.
    """

    name: str
    spec: str
    settings: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, *, recipe: bool = False) -> "System":
        """Reads a spec and the settings that follow it, separated by blanks; `recipe` names it. A
        blank that no KEY= follows is part of a path."""
        spec, *settings = re.split(r"\s+(?=[\w.]+=)", text.strip())
        changes = (setting.partition("=") for setting in settings)
        short = ("".join([key.rpartition(".")[2], *rest]) for key, *rest in changes)
        return cls(" ".join([name_of(spec, recipe=recipe), *short]), spec, tuple(settings))

    @classmethod
    def parse_all(cls, texts: Sequence[str]) -> "list[System]":
        """Reads several, named by their recipes too where they are not told apart otherwise."""
        systems = [cls.parse(text) for text in texts]
        if len({system.name for system in systems}) < len(systems):
            systems = [cls.parse(text, recipe=True) for text in texts]
        return systems


@dataclasses.dataclass(frozen=True)
class Trained:
    """A system, how it was prepared, and the result of each seed."""

    system: System
    run: train.Run
    results: tuple[train.Result, ...]
    images_per_second: float

    @property
    def name(self) -> str:
        """The system's name in a table, which says so where the test split chose a checkpoint."""
        chosen = self.run.config.train.select_on == "test"
        return self.system.name + " (best on test)" * chosen

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Top-1 accuracies on the test split, one for each seed."""
        return tuple(result.test.accuracy for result in self.results)

    @property
    def steps(self) -> float:
        """Steps taken, the mean over seeds: train.patience may have ended a run."""
        return statistics.fmean(result.step for result in self.results)


def images(config: ml_collections.ConfigDict, loaded: dict[tuple, data.Dataset]) -> data.Dataset:
    """The data set as a system reads it: loaded, or that of another system that reads it alike."""
    config = init_from.with_weights(config)
    key = tuple(config.data[k] for k in ("image_size", "channels", "fit", "dir", "on_bad_image"))
    if key not in loaded:
        loaded[key] = train.load_data(config)
    return loaded[key]


def train_all(
    systems: Sequence[System],
    out: Path,
    *,
    settings: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    equal: str = "length",
) -> list[Trained]:
    """Trains the systems that are not trained yet, each with every seed.

    Args:
      settings: KEY=VALUE texts for every configuration, before a system's own.
      seeds: one run of every system for each.
      equal: 'length' refuses systems of unequal epochs, steps or batches; by 'compute' the first
        one's images times its FLOPs decide how many steps the others take; 'data' asks for no more
        than equal data.

    Returns:
      the systems in their order, without those whose training diverged: see `refuse_left_out`.

    Raises:
      Diverged: of every system.
      ValueError: configurations are wrong, equal or of different data; also as
        `hsvit_jax.train.train`.
    """
    chosen = {system: [*settings, *system.settings] for system in systems}
    try:
        configs = {system: _config(system, given) for system, given in chosen.items()}
        _check({system.name: config for system, config in configs.items()}, systems, seeds)
        _check_read(configs.values(), settings)
    except ValueError as error:
        raise cli.Misuse(str(error)) from error
    _check_folders(configs, chosen, repeated=equal == "data")
    loaded: dict[tuple, data.Dataset] = {}
    runs = {system: _prepare(system, config, loaded) for system, config in configs.items()}
    if equal == "length":  # which the number of images may have decided
        _check_length({system.name: run.config.train for system, run in runs.items()})
    if equal == "compute":
        for system, steps in _equal_steps(runs).items():
            chosen[system] += [f"train.steps={steps}", "train.epochs=0"]
            configs[system] = _config(system, chosen[system])
            runs[system] = _prepare(system, configs[system], loaded)
    trained = []
    for system, config in configs.items():
        results, rates, diverged = [], [], None
        for seed in seeds:
            seeded = config_lib.override(config, [f"seed={seed}"])
            name = config_lib.default_workdir(seeded, system.spec, chosen[system])
            folder = out / Path(name).name
            cli.note(f"{system.name}, seed {seed}: {folder}")
            dataset = images(seeded, loaded)
            try:
                results.append(train.train(seeded, folder, dataset=dataset, as_begun=True))
            except train.Diverged as error:
                diverged = error
                cli.note(f"{system.name}, seed {seed} is left out: {error}")
                break
            lines = metrics.read_metrics(folder / "metrics.jsonl")
            every = (line.get("images_per_second") for line in lines)
            rates += [rate for rate in every if isinstance(rate, float)]
        if not diverged:
            rate = statistics.median(rates) if rates else 0.0
            trained.append(Trained(system, runs[system], tuple(results), rate))
    if not trained and diverged:
        raise diverged
    return trained


def refuse_left_out(wanted: int, got: int) -> None:
    """Raises Diverged, once everything is written, unless every training came to its end."""
    if got < wanted:
        raise train.Diverged(
            f"{wanted - got} of {wanted} are left out, as their training diverged: see above. The "
            "others need not be trained again"
        )


def _config(system: System, settings: Sequence[str]) -> ml_collections.ConfigDict:
    """A system's configuration. Of the settings of all, one of the network may be for others."""
    try:
        config = config_lib.get_config(system.spec, *settings)
    except ValueError as error:
        raise ValueError(f"{system.name}: {error}") from error
    own = {setting.partition("=")[0] for setting in system.settings}
    common = {key for key in config.user if key.startswith("model.")} - own
    unread = {key for key in common if _unread(config, key)}
    return config.with_user({k: v for k, v in config.user.items() if k not in unread})


def _unread(config: config_lib.Settings, key: str) -> ValueError | None:
    """Returns the refusal of a key without effect."""
    try:
        config_lib.refuse_unread(config, (key,))
    except ValueError as error:
        return error
    return None


def _check_read(configs: Collection[ml_collections.ConfigDict], settings: Sequence[str]) -> None:
    """Raises ValueError for a network's setting of all that no system reads."""
    for key in (text.partition("=")[0] for text in settings if text.startswith("model.")):
        complaints = [_unread(config, key) for config in configs]
        if all(complaints):
            raise complaints[0]


def _prepare(system: System, config: ml_collections.ConfigDict, loaded: dict) -> train.Run:
    """Prepares a system's run; its mistakes are told with its name."""
    try:
        return train.prepare(config, dataset=images(config, loaded))
    except ValueError as error:
        raise ValueError(f"{system.name}: {error}") from error


def _equal_steps(runs: Mapping[System, train.Run]) -> dict[System, int]:
    """The steps that take each system the FLOPs of the first one's whole training."""
    flops = {
        system: run.config.train.batch * costs.flops(run.model) for system, run in runs.items()
    }
    first = next(iter(runs))
    budget = runs[first].total_steps * flops[first]
    return {system: max(round(budget / of_a_step), 1) for system, of_a_step in flops.items()}


def _check(
    configs: Mapping[str, ml_collections.ConfigDict],
    systems: Sequence[System],
    seeds: Sequence[int],
) -> None:
    """Raises ValueError unless all systems differ and are trained on the same data."""
    if len(configs) < len(systems):
        names = [system.name for system in systems]
        raise ValueError(
            f"a system is named twice in {few(names)}: leave one out, or give "
            "another name to its file (in a study: to its x or line)"
        )
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds needs different whole numbers; got {','.join(map(str, seeds))}")
    if any("seed" in config.user for config in configs.values()):
        raise ValueError("--seeds names the seeds of all systems: leave the setting seed out")
    for key in ("name", "val_fraction", "fraction"):
        values = {name: config.data[key] for name, config in configs.items()}
        if len(set(values.values())) > 1:
            names = ", ".join(f"{name} has {value}" for name, value in values.items())
            raise ValueError(f"systems are compared on the same data, but of data.{key} {names}")


def _check_folders(
    configs: Mapping[System, ml_collections.ConfigDict],
    chosen: Mapping[System, Sequence[str]],
    repeated: bool,
) -> None:
    """Raises ValueError for systems that differ in what a run's folder is not named by: the second
    would find the first one's run. Equal ones may be `repeated` in a study's grid."""
    found: dict[str, tuple[str, list]] = {}
    for system, config in configs.items():
        folder = config_lib.default_workdir(config, system.spec, chosen[system])
        leaves = list(config_lib.leaves(config))
        same = [name for name, other in found.values() if other == leaves]
        if same and not repeated:
            raise ValueError(
                f"{same[0]} and {system.name} are the same configuration: leave one of them out"
            )
        name, other = found.setdefault(folder, (system.name, leaves))
        if leaves != other:
            raise ValueError(
                f"{name} and {system.name} differ in settings that change no result, and one run "
                "would serve for both: leave one of them out"
            )


def _check_length(sections: Mapping[str, ml_collections.ConfigDict]) -> None:
    """Raises ValueError unless all `train` sections ask for the same epochs, steps and batch."""
    lengths = {name: (train.epochs, train.steps, train.batch) for name, train in sections.items()}
    if len(set(lengths.values())) > 1:
        runs = ", ".join(f"{name} {e:g}/{s}/{b}" for name, (e, s, b) in lengths.items())
        raise ValueError(
            f"systems are compared after equal training, but train.epochs/steps/batch are: {runs}; "
            "set them for all with --config.train.epochs=... and --config.train.batch=..."
        )


def name_of(spec: str, *, recipe: bool = False) -> str:
    """A system's name in the table: its file, the words that are no data or recipe, and the recipe
    where it is asked for."""
    place, _, argument = spec.partition(":")
    words = [word for word in map(str.strip, argument.split(",")) if word]
    common = [word for word in words if config_lib.is_word(word)]
    own = [word for word in words if word not in common or word in config_lib.SWITCHES]
    last = [config_lib.parse_argument(",".join(common))[1]] if recipe else []
    return " ".join([Path(place).stem, *own, *last])


def point(one: Trained, x: str, line: str) -> grid.Point:
    """The point of a trained system in a study's grid."""
    run, test = one.run, one.results[0].test
    return grid.Point(
        x=x,
        line=line + one.name.removeprefix(one.system.name),
        parameters=costs.parameters(run.model),
        flops=costs.flops(run.model),
        training_images=len(run.dataset.train),
        steps=round(one.steps),
        batch=run.config.train.batch,
        examples=test.examples,
        accuracies=one.accuracies,
    )


def seeds_of(words: Sequence[str]) -> list[int]:
    """Reads --seeds."""
    if not all(seed.strip().isdecimal() for seed in words):
        raise cli.Misuse(f"--seeds needs whole numbers; got {','.join(words)}")
    if wrong := [seed for seed in words if not keys.KEYS["seed"].fits(int(seed))]:
        raise cli.Misuse(f"a seed must be {keys.KEYS['seed'].expected}; got {wrong[0]}")
    return [int(seed) for seed in words]
