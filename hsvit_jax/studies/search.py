"""The search for settings: trials on the training images, judged on the validation split alone.

Optuna proposes each trial's values (its tree-structured Parzen estimator) and ends trials whose
validation curve lies below the median of the others. The same call resumes.
"""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna import distributions as spaces

from hsvit_jax import artifacts, train
from hsvit_jax import config as config_lib
from hsvit_jax.config import schema
from hsvit_jax.runtime import coordination
from hsvit_jax.studies import engine, tables
from hsvit_jax.studies.engine import Row
from hsvit_jax.studies.space import Span
from hsvit_jax.train import metrics, workdir

_State = optuna.trial.TrialState


@dataclasses.dataclass(frozen=True)
class Search:
    """The configuration of all trials, as --config and KEY=VALUE texts, and what varies.

    Attributes:
      space: the spans as Optuna draws from them.
      figure: the attribute of `Evaluation` that is maximised on the validation split.
    """

    spec: str
    settings: Sequence[str]
    spans: Mapping[str, Span]
    space: Mapping[str, spaces.BaseDistribution]
    figure: str

    @classmethod
    def of(cls, spec: str, settings: Sequence[str], spans: Mapping[str, Span]) -> "Search":
        """Makes a search.

        Raises:
          ValueError: no key varies, an empty range, a value that its key does not take, or trials
            that would not share their validation images.
        """
        if not spans:
            raise ValueError(
                "the search needs a setting with several values: add one, such as "
                "--config.optim.learning_rate=1e-4..1e-2:log"
            )
        first = [*settings, *(f"{key}={span.values[0]}" for key, span in spans.items())]
        each = [f"{key}={value}" for key, span in spans.items() for value in span.values]
        systems = [engine.System(setting, spec, (*first, setting)) for setting in each]
        config = next(iter(engine.configure(systems).values()))
        if config.train.select_on not in ("val", "macro_f1"):
            raise ValueError(
                f"the search judges by the validation split, not by {config.train.select_on}: set "
                "train.select_on=val or macro_f1"
            )
        space: dict[str, spaces.BaseDistribution] = {}
        for key, (values, is_range, log) in spans.items():
            kind = schema.of(key, config.model).kind
            made = spaces.IntDistribution if kind is int else spaces.FloatDistribution
            try:
                if is_range:
                    space[key] = made(*map(kind, map(float, values)), log=log)
                else:
                    space[key] = spaces.CategoricalDistribution(values)
            except ValueError as error:
                raise ValueError(f"{key}={'..'.join(values)}: {error} Set LOW..HIGH") from error
        return cls(spec, settings, spans, space, config_lib.selection(config)[1])

    def run(self, out: Path, trials: int) -> list[Row]:
        """Runs trials up to a number of them, with those of an earlier call.

        A trial's values follow from the seed and the trials before it. The best trial keeps its
        checkpoints, the others their metrics.

        Args:
          out: folder of the trials' runs and of study.db.

        Returns:
          a row for each trial, the best one first and trials that ended early last.

        Raises:
          Diverged: no trial was completed.
          ValueError: `out` holds another search, or as `hsvit_jax.train.train`.
        """
        artifacts.make_folder(out)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with workdir.only_run_in(out):
            study = optuna.create_study(
                storage=f"sqlite:///{out / 'study.db'}",
                study_name="search",
                direction="maximize",
                pruner=optuna.pruners.MedianPruner(),
                load_if_exists=True,
            )
            about = f"{self.spec} {self.settings} {self.spans}"
            if (other := study.user_attrs.get("about", about)) != about:
                raise ValueError(f"{out} holds the search {other}: name another folder")
            study.set_user_attr("about", about)
            loaded: dict = {}
            while len(rows := _rows(study)) < trials:
                self._take(study, out / f"trial{len(rows)}", loaded)
                for row in _rows(study)[1:]:
                    shutil.rmtree(out / row["trial"] / "checkpoints", ignore_errors=True)
        if rows[0]["ended"]:
            raise train.Diverged("no trial was completed: search lower learning rates")
        return rows

    def _take(self, study: optuna.Study, folder: Path, loaded: dict) -> None:
        """Runs a trial, or the rest of one that a stopped search has begun."""
        for stale in study.get_trials(states=(_State.RUNNING,)):
            study.tell(stale.number, state=_State.FAIL)
            study.enqueue_trial(stale.params)
        seed = config_lib.get_config(self.spec, *self.settings).seed
        seeds = np.random.SeedSequence([seed, *folder.name.encode()])
        study.sampler = optuna.samplers.TPESampler(seed=int(seeds.generate_state(1)[0]))
        trial = study.ask(dict(self.space))
        values = [f"{key}={value}" for key, value in _rounded(trial.params).items()]
        config = config_lib.get_config(self.spec, *self.settings, *values)
        coordination.print_once(f"{folder.name}: {' '.join(values)}")
        given = {"dataset": engine.images(config, loaded), "as_begun": True}
        given["callbacks"] = [_Curve(trial, folder, self.figure)]
        try:
            result = train.train(config, folder, evaluate_test=False, **given)
            study.tell(trial, result.validation.figures[self.figure])
        except (optuna.TrialPruned, train.Diverged) as error:
            coordination.print_once(f"{folder.name} ends early: {error}")
            study.tell(trial, state=_State.PRUNED)

    def write(self, rows: Sequence[Row], out: Path, command: str) -> list[Any]:
        """Writes the rows as Markdown and CSV, and a panel for each key as PNG.

        Args:
          command: the command line that made them.

        Returns:
          the table of the ten best and the three paths.
        """
        name = f"validation {self.figure.replace('_', ' ')}"
        keys = ("trial", *self.spans, "evaluations", "ended")
        columns = {key: lambda row, key=key: str(row[key]) for key in keys}
        columns |= {name: lambda row: f"{row['accuracy']:.2%}"}
        best, every = (artifacts.markdown(artifacts.table(columns, x)) for x in (rows[:10], rows))
        note = f"The best of {len(rows)} is optimistic: evaluate it once on the test split."
        panels = {key: key for key in self.spans}
        plot = tables.figure(rows, panels, lambda x: f"ended {x['ended']}".strip(), points=True)
        plot.axes[0].set_ylabel(f"{name} (%)")
        page = f"{every}\n\n{note}\n\n    {command}\n"
        return [best, *engine.save(rows, " ".join([*keys, "accuracy"]), out, "search", page, plot)]


class _Curve(train.Callback):
    """Reports a trial's validation curve, and ends the trial where Optuna prunes it."""

    def __init__(self, trial: optuna.Trial, folder: Path, figure: str) -> None:
        self.trial, self.path, self.figure, self.seen = trial, folder / "metrics.jsonl", figure, 0

    def on_evaluation(self, step: int, split: str, result: Any) -> None:
        """Reports all evaluations since the last call; a resumed trial has earlier ones."""
        curve = metrics.series(metrics.read_metrics(self.path), self.figure).get("val", [])
        values = [*(value for _, value in curve), result.figures[self.figure]]  # not written yet
        for number, value in enumerate(values[self.seen :], self.seen):
            self.trial.report(value, number)
        self.seen = len(values)
        if self.trial.should_prune():
            raise optuna.TrialPruned("its curve lies below the median of the other trials'")


def _rows(study: optuna.Study) -> list[Row]:
    """The trials that have ended, best first, and those that ended early last."""
    rows = [
        {
            "trial": f"trial{number}",
            **_rounded(trial.params),
            "evaluations": len(trial.intermediate_values),
            "ended": "" if trial.state == _State.COMPLETE else "early",
            "accuracy": float("nan") if trial.value is None else trial.value,
        }
        for number, trial in enumerate(study.get_trials(states=(_State.COMPLETE, _State.PRUNED)))
    ]
    return sorted(rows, key=lambda row: (row["ended"], -np.nan_to_num(row["accuracy"])))


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """A trial's values as they are set: numbers with four figures."""
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
