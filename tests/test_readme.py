"""What README shows works as shown."""

import re
from pathlib import Path

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["probabilities"].shape == (4, 10)
    assert abs(names["probabilities"].sum(1) - 1).max() < 1e-5
    assert (tmp_path / "runs" / "from-python" / "curves.png").exists()


def test_files_that_are_named_exist():
    root = Path(__file__).resolve().parents[1]
    named = set(re.findall(r"(?:configs|docs|benchmarks|tests|launch)/[\w./-]*\w", README))
    assert named and all((root / name).exists() for name in named)


def test_make_targets_that_are_named_exist():
    makefile = (Path(__file__).resolve().parents[1] / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"make ([a-z-]+)  ", README))
    assert {"quickstart", "test"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)
