"""What the program writes: whole or not at all, through no link, and readable on a terminal."""

import ast
import errno
import os
import stat
from pathlib import Path

import matplotlib
import pytest

import hsvit_jax
from hsvit_jax import report

PACKAGE = Path(hsvit_jax.__file__).parent


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    report.write_file(file, "ä")
    assert file.read_bytes() == "ä".encode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~os.umask(os.umask(0o22))

    def full(descriptor):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="too large") as caught:
        report.write_file(file, b"b")
    assert caught.value.filename == str(file)  # not of the part that is gone
    assert file.read_bytes() == "ä".encode()
    assert os.listdir(tmp_path) == ["a.txt"]


def test_figures_take_no_text_for_tex(tmp_path):
    """Whatever the user's own are drawn by."""
    with matplotlib.rc_context({"text.usetex": True}):
        figure = report.figure(3, 3)
        figure.suptitle("a_b")
        axes = figure.subplots()
        axes.plot([0, 1], label="50 %")
        axes.legend()
        report.save_figure(figure, tmp_path / "a.png")
        assert matplotlib.rcParams["text.usetex"]
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_folder_of_a_file_is_made_or_refused(tmp_path):
    report.write_file(tmp_path / "new" / "folder" / "a", "x")
    with pytest.raises(ValueError, match="cannot be made a folder"):
        report.write_file(tmp_path / "new" / "folder" / "a" / "b", "x")
    with pytest.raises(ValueError, match="no file can be made in /proc"):
        report.write_file(Path("/proc/x"), "x")


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_only_regular_files_are_written(tmp_path, kind):
    path, target = tmp_path / "out.png", tmp_path / "target"
    target.write_text("precious")
    if kind == "link":
        path.symlink_to(target)
    else:
        {"fifo": os.mkfifo, "folder": os.mkdir}[kind](path)
    writes = (
        lambda: report.write_file(path, "x"),
        lambda: report.save_csv(path, [["x"]]),
        lambda: report.append_to(path),
    )
    for write in writes:
        with pytest.raises(ValueError, match=r"out\.png is a link or no regular file"):
            write()
    assert target.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["out.png", "target"]


def test_nothing_else_writes_files():
    """But data and checkpoints, into folders that they have just made. Mode 'x' follows no link."""
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "report.py" or {"data", "checkpoint"} & {*path.parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            words = [w.value for w in node.args if isinstance(w, ast.Constant)]
            opens = name == "open" and any(str(w).strip("bt+") in ("w", "a") for w in words)
            if name in ("savefig", "write_text", "write_bytes") or opens:
                offenders.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert offenders == []


def test_text_for_a_terminal_has_no_control_characters():
    text = "cat\x1b[2J \x9b31m \u202edog\u2066 \ud800\nnext\tline ü 猫"
    shown = report.printable(text)
    assert shown == (r"cat\x1b[2J \x9b31m \u202edog\u2066 \ud800" + "\nnext\tline ü 猫")
    assert report.printable(shown) == shown


def test_wilson_intervals():
    """Figures of Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    for right, total, ends in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605))):
        assert report.wilson(right, total) == pytest.approx(ends, abs=5e-5)
    assert report.wilson(0, 20) == (0, pytest.approx(0.1611, abs=5e-5))
    assert report.wilson(29, 29) == (pytest.approx(0.8830, abs=5e-5), 1)
    assert report.wilson(0, 0) == (0, 1)
    assert report.accuracy_text(0.9, 90) == "90.00% (95% interval 82.1–94.6)"
    assert report.accuracy_text(0.9, 10_000) == "90.00%"
