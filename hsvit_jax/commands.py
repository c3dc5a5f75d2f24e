"""What each mode of the command line does."""

import shlex
import sys
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from hsvit_jax import config as config_lib
from hsvit_jax.cli import Request


def _train(request: Request) -> int:
    from hsvit_jax import train
    from hsvit_jax.runtime import cluster, coordination

    job = cluster.find(request.flags.distributed)
    if job is not None:
        cluster.start(job, recoverable=request.flags.recoverable)
    result = train.train(
        request.config,
        request.workdir,
        stall_timeout=request.flags.stall_timeout,
        recoverable=request.flags.recoverable,
    )
    if not coordination.is_lead():
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


def _load(request: Request) -> Any:
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


def _eval(request: Request) -> int:
    from hsvit_jax import train
    from hsvit_jax.train import evaluate, metrics

    classifier = _load(request)
    config, split = classifier.config, request.flags.split
    if request.config is not None:  # other data for the same network
        config = config.copy_and_resolve_references().unlock()
        for key in ("name", "dir", "val_fraction", "on_bad_image"):
            config.data[key] = request.config.data[key]
        config.eval.batch = request.config.eval.batch
        if (request.flags.checkpoint or request.flags.workdir) and split is None:
            split = "all" if config.data.name.startswith("folder=") else None
    split = split or "test"
    dataset = train.load_data(config, whole=split == "all")
    _check_classes(classifier.class_names, dataset.info.class_names, config.data.name)
    if request.config is None and classifier.fingerprint not in (None, dataset.fingerprint):
        _note(f"note: {config.data.name} is not what it was when this network was trained")
    if split == "all" and classifier.fingerprint == dataset.fingerprint:
        _note(
            "note: the network was trained on most of these images; --split=test evaluates those "
            "that it has not seen"
        )
    part = dataset.test if split == "all" else getattr(dataset, split)
    if not len(part):
        raise ValueError(f"{config.data.name} has no {split} split here")
    images = sum(map(len, (dataset.train, dataset.val, dataset.test)))
    _note(f"{config.data.name}, split {split}: {len(part):,} of {images:,} images")
    if request.flags.curve is not None:
        return _curve(request, classifier, config, part, split)
    evaluator = evaluate.make_evaluator(
        classifier.model,
        classifier.mesh,
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        num_classes=config.data.num_classes,
        votes_G=_votes(request.flags.drop_groups, classifier.model),
    )
    batch = config_lib.eval_batch(config)
    result = evaluator(classifier.params, classifier.stats, part, batch)
    line = {"split": split, "loss": result.loss, "accuracy": result.accuracy}
    line |= {"top5": result.top5, "examples": result.examples}
    print(metrics.to_line(classifier.step, line))
    _note(confusion_table(result.confusion_KK, classifier.class_names))
    return 0


def _note(text: str) -> None:
    """A remark beside the results, which alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


def _curve(
    request: Request,
    classifier: Any,
    config: ml_collections.ConfigDict,
    part: Any,
    split: str,
) -> int:
    """Accuracy against the number of lost groups, as a PNG, a CSV and lines of JSON."""
    from hsvit_jax import votes
    from hsvit_jax.train import metrics

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
        batch=config_lib.eval_batch(config),
        seed=config.seed,
    )
    name = f"{config.model.variant}, {config.data.name}, {split} split"
    table = votes.write(points, path, f"{name}, step {classifier.step:,}")
    for point in points:
        print(metrics.to_line(classifier.step, {"split": split, **vars(point)}))
    _note(f"{path} and {table}")
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


def _predict(request: Request) -> int:
    from hsvit_jax import predict

    files = predict.image_files(request.words)
    rows, errors = predict.predict_files(_load(request), files, request.flags.top_k)
    if rows:
        print(predict.render(rows, request.flags.format))
    for error in errors:
        _note(error)
    return 1 if errors else 0


def _visualize(request: Request) -> int:
    from hsvit_jax import predict, visualize

    files = predict.image_files(request.words, request.flags.mode)
    out = Path(request.flags.out or "views")
    written, errors = visualize.run(_load(request), files, out)
    for path in written:
        print(path)
    for error in errors:
        _note(error)
    return 1 if errors else 0


def _summary(request: Request) -> int:
    from hsvit_jax import data, summary, train

    info = data.describe(request.config.data.name, request.config.data.dir or None)
    config = config_lib.resolve(request.config, info)
    print(summary.summarise(config, train.build_model(config)))
    return 0


def _plan(request: Request) -> int:
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


MODES = {
    "train": _train,
    "eval": _eval,
    "predict": _predict,
    "visualize": _visualize,
    "summary": _summary,
    "plan": _plan,
}
