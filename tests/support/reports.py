"""A report on an untrained network, whose class names try to leave their places."""

import functools
import json
from pathlib import Path

from support import small_runs

from hsvit_jax import classifier, data, run_report

NAMES = (
    *("<script>document.title = 'taken'</script>", '"><img src=x onerror=alert(1)>', "a & b"),
    *("</table></style><h1>", "$script ${body} {0}", "\x1b[2J\u202edlrow", "x" * 60),
)


@functools.cache
def untrained() -> tuple[classifier.Classifier, data.Dataset]:
    """A small network with made-up weights, and its data."""
    dataset = small_runs.small_dataset()
    object.__setattr__(dataset.info, "class_names", NAMES)
    return small_runs.made_up_classifier(NAMES), dataset


def written(folder: Path) -> Path:
    """The report, in the folder of a made-up run."""
    lines = [
        {"step": 1, "loss": 2.0, "accuracy": 0.25, "learning_rate": 1e-3},
        {"step": 2, "loss": None, "accuracy": 0.5, "learning_rate": 5e-4},
        {"step": 2, "split": "val", "loss": 1.5, "accuracy": 0.4, "examples": 21},
        {"step": 3, "split": "test", "loss": 1.5, "accuracy": 0.3, "examples": 23},
        {"step": 4, "split": "test", "loss": 1.5, "accuracy": 0.9, "examples": 23},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "environment.json").write_text(json.dumps({"command": "python <b>train</b>"}))
    trained, dataset = untrained()
    return run_report.write(trained, folder, folder / "report.html", dataset=dataset)
