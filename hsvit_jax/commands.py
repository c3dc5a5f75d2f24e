"""What each mode of the command line does, and how mistakes and interruptions leave it."""

import contextlib
import errno
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from absl import flags

from hsvit_jax import config as config_lib
from hsvit_jax import configfile, signals

# Exit codes, besides 0: 1 a mistake in the request or its data, 2 in the command line's form,
# 3 training diverged, 42 stopped by SIGTERM, 75 stalled (see watchdog.py), 130 by Ctrl-C, 141 the
# reader of a pipe went away.
_MISTAKE, _USAGE, _DIVERGED, _CTRL_C, _PIPE = 1, 2, 3, 130, 141

# What the machine refuses rather than the program: one line says it all.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class _Request:
    """A parsed command line; `spec` is the text of --config, `settings` its KEY=VALUE overrides."""

    flags: flags.FlagValues
    spec: str
    settings: list[str]
    config: ml_collections.ConfigDict | None
    paths: list[str]

    @property
    def workdir(self) -> str:
        """The folder given, or the one that this configuration has by default."""
        return self.flags.workdir or config_lib.default_workdir(
            self.config, self.spec, self.settings
        )


def run(argv: list[str], usage: str, values: flags.FlagValues) -> int:
    """Parses `argv` into `values` and runs the mode; returns the exit code and never shows a
    traceback for a user's mistake. A bug still does."""
    spec, settings, rest, wants_help = _separate(argv[1:])
    try:
        paths = values([argv[0], *rest])[1:]
        config = configfile.get_config(spec, *settings) if spec is not None else None
    except (flags.Error, ValueError) as error:
        return _say(f"{error}\n(see: python -m hsvit_jax.main --help)", _USAGE)
    if wants_help:
        print(_help(usage, values, config))
        return 0
    if config is None and (settings or values.mode in ("train", "summary", "plan")):
        why = f"--config.{settings[0]}" if settings else f"--mode={values.mode}"
        return _say(f"{why} needs --config=FILE\n\n{usage}", _USAGE)
    if paths and values.mode not in ("predict", "visualize"):
        return _say(
            f"unexpected words: {' '.join(paths)} (flags are --name=value; only --mode=predict "
            f"and --mode=visualize take files)\n\n{usage}",
            _USAGE,
        )
    if values.mode != "train" and (values.distributed not in ("auto", "off") or values.recoverable):
        return _say(
            f"--distributed and --recoverable are for --mode=train, not {values.mode}", _USAGE
        )
    from hsvit_jax import together  # late: it imports jax

    with _plain_warnings():
        return together.leave(_guarded(argv, _Request(values, spec or "", settings, config, paths)))


def _separate(words: list[str]) -> tuple[str | None, list[str], list[str], bool]:
    """(--config, its overrides as KEY=VALUE, all other words, whether help is asked for)."""
    spec, settings, rest, wants_help = None, [], [], False
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            rest += [word, *waiting]
            break
        name = word.lstrip("-").partition("=")[0] if word.startswith("-") else ""
        if name in ("help", "h", "helpshort", "helpfull"):
            wants_help = True
        elif name == "config" or name.startswith("config."):
            text = word.lstrip("-")
            if "=" not in text:
                text += "=" + next(waiting, "")
            if name == "config":
                spec = text.removeprefix("config=")
            else:
                settings.append(text.removeprefix("config."))
        else:
            rest.append(word)
    return spec, settings, rest, wants_help


def _help(usage: str, values: flags.FlagValues, config: ml_collections.ConfigDict | None) -> str:
    lines = [usage, "", "Flags:"]
    for flag in (values[name] for name in values):
        given = f"={flag.default}" if flag.default is not None else "=..."
        lines.append(f"  {'--' + flag.name + given:<20}{flag.help}")
    if config is not None:
        lines += ["", "Configuration (value as it stands):", configfile.describe(config)]
    return "\n".join(lines)


def _guarded(argv: list[str], request: _Request) -> int:
    """Runs the mode, and turns every end that is no bug into a line and an exit code."""
    from hsvit_jax import train

    try:
        code = _MODES[request.flags.mode](request)
        sys.stdout.flush()
        return code
    except signals.Interrupted as stop:
        again = shlex.join(["python", "-m", "hsvit_jax.main", *argv[1:]])
        return _end(
            f"{stop}; saved. To go on, give the same command again:\n  {again}", stop.exit_code
        )
    except KeyboardInterrupt:
        return _end("stopped by Ctrl-C; there was nothing to save", _CTRL_C)
    except train.Diverged as error:
        return _end(str(error), _DIVERGED)
    except BrokenPipeError:  # `| head` has seen enough; Python would complain again on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE
    except ValueError as error:
        if _is_ours(error):
            return _end(str(error), _MISTAKE)
        raise
    except OSError as error:
        if error.errno in _REFUSED:
            return _end(f"{error.strerror}: {error.filename or 'writing'}", _MISTAKE)
        raise


def _end(text: str, code: int) -> int:
    """As `_say`, once for all processes of a job."""
    from hsvit_jax import together

    together.say(text)
    return code


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """This package's warnings are for the user: one line, without a place in the source."""
    from hsvit_jax import together  # late: it imports jax

    def show(
        message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any
    ) -> None:
        if category.__module__.startswith("hsvit_jax") or "hsvit_jax" in Path(filename).parts:
            if together.is_lead():
                print(f"warning: {message}", file=sys.stderr, flush=True)
        else:
            before(message, category, filename, *rest, **more)

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _is_ours(error: ValueError) -> bool:
    """A ValueError raised by this package speaks to the user; one from elsewhere is a bug."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(
        "hsvit_jax"
    )


def _train(request: _Request) -> int:
    from hsvit_jax import distributed, together, train

    job = distributed.find(request.flags.distributed)
    if job is not None:
        distributed.start(job, recoverable=request.flags.recoverable)
    result = train.train(
        request.config,
        request.workdir,
        stall_timeout=request.flags.stall_timeout,
        recoverable=request.flags.recoverable,
    )
    if not together.is_lead():
        return 0
    test, folder = result.test, shlex.quote(request.workdir)
    print(
        f"done: test accuracy {test.accuracy:.2%} (top-5 {test.top5:.2%}, {test.examples:,} "
        f"images), checkpoint of step {result.best_step:,}, {result.parameters:,} parameters, "
        f"{result.seconds:.0f} s\n"
        f"  curves    {result.curves}\n"
        f"  evaluate  python -m hsvit_jax.main --mode=eval --checkpoint={folder}\n"
        f"  predict   python -m hsvit_jax.main --mode=predict --checkpoint={folder} IMAGE ..."
    )
    return 0


def _load(request: _Request) -> Any:
    """The classifier in --checkpoint, or --workdir, or the configuration's own folder."""
    from hsvit_jax import predict

    values = request.flags
    if not (values.checkpoint or values.workdir or request.config):
        raise ValueError(
            f"--mode={values.mode} needs --checkpoint=<folder of a run>, for example "
            "--checkpoint=runs/c2a2-digits-strong-seed0"
        )
    which = int(values.which) if values.which.isdigit() else values.which
    return predict.load(values.checkpoint or request.workdir, which)


def _eval(request: _Request) -> int:
    from hsvit_jax import evaluate, metrics, train

    classifier = _load(request)
    config = classifier.config
    if request.config is not None:  # other data for the same network
        config = config.copy_and_resolve_references().unlock()
        for key in ("name", "dir", "val_fraction", "on_bad_image"):
            config.data[key] = request.config.data[key]
    dataset = train.load_data(config)
    _check_classes(classifier.class_names, dataset.info.class_names, config.data.name)
    if request.config is None and classifier.fingerprint not in (None, dataset.fingerprint):
        _say(f"note: {config.data.name} is not what it was when this network was trained", 0)
    part = getattr(dataset, request.flags.split)
    if not len(part):
        raise ValueError(f"{config.data.name} has no {request.flags.split} split here")
    if request.flags.curve is not None:
        return _curve(request, classifier, config, part)
    evaluator = evaluate.make_evaluator(
        classifier.model,
        classifier.mesh,
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        num_classes=config.data.num_classes,
        votes_G=_votes(request.flags.drop_groups, classifier.model),
    )
    result = evaluator(classifier.params, classifier.stats, part, max(config.train.batch, 256))
    line = {"split": request.flags.split, "loss": result.loss, "accuracy": result.accuracy}
    line |= {"top5": result.top5, "examples": result.examples}
    print(metrics.to_line(classifier.step, line))
    _say(confusion_table(result.confusion_KK, classifier.class_names), 0)
    return 0


def _curve(request: _Request, classifier: Any, config: ml_collections.ConfigDict, part: Any) -> int:
    """Accuracy against the number of lost groups, as a PNG, a CSV and lines of JSON."""
    from hsvit_jax import metrics, votes

    if request.flags.drop_groups:
        raise ValueError("--curve loses groups of its own choice: leave --drop_groups out")
    path = votes.check_path(Path(request.flags.curve))
    points = votes.curve(
        classifier.model,
        classifier.mesh,
        classifier.params,
        classifier.stats,
        part,
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        batch=max(config.train.batch, 256),
        seed=config.seed,
    )
    name = f"{config.model.variant}, {config.data.name}, {request.flags.split} split"
    table = votes.write(points, path, f"{name}, step {classifier.step:,}")
    for point in points:
        print(metrics.to_line(classifier.step, {"split": request.flags.split, **vars(point)}))
    _say(f"{path} and {table}", 0)
    return 0


def _votes(lost: list[str], model: Any) -> np.ndarray | None:
    """1 for each attention group, 0 for those that are lost; None when all are there."""
    if not lost:
        return None
    groups = model.groups and model.config.groups
    if not groups:
        raise ValueError(
            f"--drop_groups={','.join(lost)}: this network has no attention groups that could be "
            "lost; leave it out"
        )
    numbers = {int(word) if word.strip().isdecimal() else -1 for word in lost}
    if not numbers <= set(range(groups)) or len(numbers) == groups:
        raise ValueError(
            f"--drop_groups={','.join(lost)}: this network has {groups} attention groups, numbered "
            f"from 0; name some of them, not all"
        )
    return np.array([float(g not in numbers) for g in range(groups)], np.float32)


def _check_classes(knows: tuple[str, ...], has: tuple[str, ...], data: str) -> None:
    """Counting hits needs the same classes in the same order."""
    if tuple(has) == tuple(knows):
        return
    missing = [name for name in knows if name not in has]
    extra = [name for name in has if name not in knows]
    raise ValueError(
        f"the checkpoint knows {len(knows)} classes and {data} has {len(has)}; only in the "
        f"checkpoint: {_few(missing)}; only in the data: {_few(extra)}. Give --config=... with "
        "data of the same classes in the same order"
    )


def _few(names: list[str]) -> str:
    """The first five names."""
    return (", ".join(names[:5]) + (", ..." if len(names) > 5 else "")) or "none"


def confusion_table(confusion_KK: Any, names: tuple[str, ...], most: int = 10) -> str:
    """The confusion matrix as text, or for many classes the `most` frequent confusions."""
    if len(names) <= 20:
        width = max(max(len(n) for n in names), len(str(confusion_KK.max())), 4)
        head = " " * width + " " + " ".join(f"{n[:width]:>{width}}" for n in names)
        rows = [
            f"{n:>{width}} " + " ".join(f"{c:>{width}}" for c in row)
            for n, row in zip(names, confusion_KK, strict=True)
        ]
        return "\n".join(["rows: true class, columns: predicted", head, *rows])
    wrong = [
        (int(confusion_KK[i, j]), names[i], names[j])
        for i in range(len(names))
        for j in range(len(names))
        if i != j and confusion_KK[i, j]
    ]
    lines = [f"{n:>6} × {true} taken for {said}" for n, true, said in sorted(wrong)[::-1][:most]]
    return "\n".join(["most frequent confusions:", *lines])


def _predict(request: _Request) -> int:
    from hsvit_jax import predict

    files = predict.image_files(request.paths)
    rows, errors = predict.predict_files(_load(request), files, request.flags.top_k)
    if rows:
        print(predict.render(rows, request.flags.format))
    for error in errors:
        _say(error, _MISTAKE)
    return _MISTAKE if errors else 0


def _visualize(request: _Request) -> int:
    from hsvit_jax import predict, visualize

    files = predict.image_files(request.paths, request.flags.mode)
    out = Path(request.flags.out or "views")
    written, errors = visualize.run(_load(request), files, out)
    for path in written:
        print(path)
    for error in errors:
        _say(error, _MISTAKE)
    return _MISTAKE if errors else 0


def _summary(request: _Request) -> int:
    from hsvit_jax import data, summary, train

    info = data.describe(request.config.data.name, request.config.data.dir or None)
    config = config_lib.resolve(request.config, info)
    print(summary.summarise(config, train.build_model(config)))
    return 0


def _plan(request: _Request) -> int:
    from hsvit_jax import data
    from hsvit_jax.planner import plan

    given = request.flags
    if given.devices is None:
        raise ValueError("--mode=plan needs --devices, for example --devices=4096")
    info = data.describe(request.config.data.name, request.config.data.dir or None)
    print(
        plan.run(
            config_lib.resolve(request.config, info),
            devices=given.devices,
            group=given.group,
            batch=given.batch,
            bandwidth=given.bandwidth,
            flops=given.flops,
            latency=given.latency,
            verify=given.verify,
            json=given.json,
            out=Path(given.out) if given.out else None,
        )
    )
    return 0


_MODES = {
    "train": _train,
    "eval": _eval,
    "predict": _predict,
    "visualize": _visualize,
    "summary": _summary,
    "plan": _plan,
}
