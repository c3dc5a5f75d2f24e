"""Times how long commands take to start, with the compilation cache warm.

    python benchmarks/start.py --rounds=5 --checkout=old=../old --checkout=new=.

Each round runs, for each checkout in turn, `hsvit --help`, `hsvit predict` of one image with a
network of the zoo, and `hsvit train` of C2A2 on digits until its first step is logged. The first
round fills the compilation cache and is dropped. The last lines hold medians and ranges, of the
time that passed and of the processor's time, which other work on the machine changes less.
"""

import argparse
import collections
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

_HSVIT = [sys.executable, "-m", "hsvit_jax"]
_TRAIN = "train --config=c2a2:digits --config.train.log_every=1 --config.train.steps=1000"


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds that child processes of `work` take, and their processor seconds."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before, began = used(), time.perf_counter()
    work()
    return time.perf_counter() - began, used() - before


def take_a_step(folder: Path, environment: dict[str, str]) -> None:
    """Trains until a first step is logged, and ends the training."""
    command, log = [*_HSVIT, *_TRAIN.split(), f"--workdir={folder}"], folder / "metrics.jsonl"
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (log.exists() and log.stat().st_size):
            time.sleep(0.005)
        process.kill()
    if process.returncode >= 0:
        raise RuntimeError(f"the training ended early, with code {process.returncode}")


def main() -> None:
    """Prints a line for each measurement, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkout", action="append", default=[], help="NAME=FOLDER")
    args = parser.parse_args()
    checkouts = [one.split("=", 1) for one in args.checkout or ["this=."]]
    found = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        image, rng = Path(folder, "digit.png"), np.random.default_rng(0)
        Image.fromarray(rng.integers(0, 256, (32, 32), np.uint8)).save(image)
        for number in range(args.rounds + 1):
            for name, checkout in checkouts:
                own = os.environ | {"PYTHONPATH": str(Path(checkout).resolve())}
                run = Path(folder, f"{name}-{number}")
                words = {"help": ["--help"], "predict": ["predict", "zoo:c2a2-digits", str(image)]}
                works = {
                    work: lambda given=given, own=own: subprocess.run(
                        [*_HSVIT, *given], env=own, check=True, capture_output=True
                    )
                    for work, given in words.items()
                }
                works["first step"] = lambda run=run, own=own: take_a_step(run, own)
                for work, start in works.items():
                    taken = timed(start)
                    print(f"{number} {name} {work}: %.2f s, processor %.2f s" % taken, flush=True)
                    if number:
                        found[work, name].append(taken)
    for (work, name), times in sorted(found.items()):
        for kind, taken in zip(("passed", "processor"), zip(*times, strict=True), strict=True):
            middle, low, high = statistics.median(taken), min(taken), max(taken)
            print(f"{work:<10} {name:<6} {kind:<9} {middle:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
