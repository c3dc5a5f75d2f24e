"""What each mode of the command line does, and how mistakes and interruptions leave it."""

import sys
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags

from hsvit_jax import config as config_lib
from hsvit_jax import signals

# Exit codes, besides 0: 1 a mistake in the request or its data, 2 in the command line's form,
# 3 training diverged, 42 stopped by SIGTERM, 130 by Ctrl-C.
_MISTAKE, _USAGE, _DIVERGED, _CTRL_C = 1, 2, 3, 130


def run(argv: list[str], usage: str) -> int:
    """Parses the flags and runs the mode; returns the exit code and never shows a traceback for a
    user's mistake. A bug still does."""
    try:
        rest = flags.FLAGS(argv)[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        return _say(_flag_message(error), _USAGE)
    if flags.FLAGS.mode in ("train", "summary") and flags.FLAGS.config is None:
        return _say(f"--mode={flags.FLAGS.mode} needs --config\n\n{usage}", _USAGE)
    if rest and flags.FLAGS.mode != "predict":
        return _say(f"unexpected words {rest}: flags are --name=value\n\n{usage}", _USAGE)
    try:
        return _MODES[flags.FLAGS.mode](flags.FLAGS, rest)
    except signals.Interrupted as stop:
        again = " ".join(["python -m hsvit_jax.main", *argv[1:]])
        return _say(
            f"{stop}; saved. To go on, give the same command again:\n  {again}", stop.exit_code
        )
    except KeyboardInterrupt:
        return _say("stopped by Ctrl-C before the first step; nothing to save", _CTRL_C)
    except ValueError as error:
        if _is_ours(error):
            return _say(str(error), _MISTAKE)
        raise
    except _diverged() as error:
        return _say(str(error), _DIVERGED)


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


def _diverged() -> type[Exception]:
    """Imported late: the module behind it imports jax."""
    from hsvit_jax import train

    return train.Diverged


def _is_ours(error: ValueError) -> bool:
    """A ValueError raised by this package speaks to the user; one from elsewhere is a bug."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(
        "hsvit_jax"
    )


def _flag_message(error: Exception) -> str:
    """The first line of a flag's error, without Python's quoting of keys."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    return f"{text}\n(see: python -m hsvit_jax.main --help)"


def _info(config: ml_collections.ConfigDict) -> Any:
    from hsvit_jax import data

    return data.describe(config.data.name, config.data.dir or None)


def _train(values: flags.FlagValues, _: list[str]) -> int:
    from hsvit_jax import train

    config = values.config
    workdir = values.workdir or config_lib.default_workdir(config, values["config"].config_filename)
    result = train.train(config, workdir)
    test = result.test
    print(
        f"done: test accuracy {test.accuracy:.2%} (top-5 {test.top5:.2%}, {test.examples:,} "
        f"images), best checkpoint of step {result.best_step:,}, {result.parameters:,} parameters, "
        f"{result.seconds:.0f} s\n"
        f"  curves    {result.curves}\n"
        f"  evaluate  python -m hsvit_jax.main --mode=eval --checkpoint={workdir}\n"
        f"  predict   python -m hsvit_jax.main --mode=predict --checkpoint={workdir} IMAGE ..."
    )
    return 0


def _source(values: flags.FlagValues) -> Path:
    """The folder that eval and predict read: --checkpoint, or --workdir, or the config's own."""
    if values.checkpoint or values.workdir:
        return Path(values.checkpoint or values.workdir)
    if values.config is None:
        raise ValueError(
            f"--mode={values.mode} needs --checkpoint=<folder of a run>, for example "
            "--checkpoint=runs/c2a2-digits-strong-seed0"
        )
    return Path(config_lib.default_workdir(values.config, values["config"].config_filename))


def _which(values: flags.FlagValues) -> str | int:
    return int(values.which) if values.which.isdigit() else values.which


def _eval(values: flags.FlagValues, _: list[str]) -> int:
    import json

    from hsvit_jax import evaluate, predict, train

    classifier = predict.load(_source(values), _which(values))
    config = classifier.config
    if values.config is not None:  # other data for the same network
        config = config.copy_and_resolve_references().unlock()
        for key in ("name", "dir", "val_fraction", "on_bad_image"):
            config.data[key] = values.config.data[key]
    dataset = train.load_data(config)
    if tuple(dataset.info.class_names) != classifier.class_names:
        raise ValueError(
            f"the checkpoint knows {len(classifier.class_names)} classes and {config.data.name} "
            f"has {len(dataset.info.class_names)} others; the first of each: "
            f"{classifier.class_names[0]!r}, {dataset.info.class_names[0]!r}"
        )
    evaluator = evaluate.make_evaluator(
        classifier.model,
        classifier.mesh,
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        num_classes=config.data.num_classes,
    )
    part = getattr(dataset, values.split)
    result = evaluator(classifier.params, classifier.stats, part, max(config.train.batch, 256))
    print(
        json.dumps(
            {
                "step": classifier.step,
                "split": values.split,
                "loss": result.loss,
                "accuracy": result.accuracy,
                "top5": result.top5,
                "examples": result.examples,
            }
        )
    )
    print(confusion_table(result.confusion_KK, classifier.class_names), file=sys.stderr)
    return 0


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


def _predict(values: flags.FlagValues, paths: list[str]) -> int:
    from hsvit_jax import predict

    files = predict.image_files(paths)
    classifier = predict.load(_source(values), _which(values))
    rows, errors = predict.predict_files(classifier, files, values.top_k)
    print(predict.render(rows, values.format))
    for error in errors:
        print(error, file=sys.stderr)
    return _MISTAKE if errors else 0


def _summary(values: flags.FlagValues, _: list[str]) -> int:
    from hsvit_jax import summary, train

    config = config_lib.resolve(values.config, _info(values.config))
    print(summary.summarise(config, train.build_model(config)))
    return 0


_MODES = {"train": _train, "eval": _eval, "predict": _predict, "summary": _summary}
