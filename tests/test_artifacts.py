"""What the program writes: whole or not at all, through no link, and readable on a terminal."""

import ast
import csv
import errno
import io
import os
import re
import stat
from pathlib import Path

import matplotlib
import pytest

import hsvit_jax
from hsvit_jax import artifacts
from hsvit_jax.text import printable

PACKAGE = Path(hsvit_jax.__file__).parent


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    artifacts.write_file(file, "ä")
    assert file.read_bytes() == "ä".encode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~os.umask(os.umask(0o22))

    def full(descriptor):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="too large") as caught:
        artifacts.write_file(file, b"b")
    assert caught.value.filename == str(file)  # not of the part that is gone
    assert file.read_bytes() == "ä".encode()
    assert os.listdir(tmp_path) == ["a.txt"]


def test_figures_take_no_text_for_tex(tmp_path):
    """Whatever the user's own are drawn by."""
    with matplotlib.rc_context({"text.usetex": True}):
        figure = artifacts.figure(3, 3)
        figure.suptitle("a_b")
        axes = figure.subplots()
        axes.plot([0, 1], label="50 %")
        axes.legend()
        artifacts.save_figure(figure, tmp_path / "a.png")
        assert matplotlib.rcParams["text.usetex"]
    assert (tmp_path / "a.png").stat().st_size > 1000


def drawn(names, path):
    """A figure with names where figures have them, saved; its texts as they are drawn."""
    figure = artifacts.figure(4, 3)
    figure.suptitle(" ".join(names), parse_math=False)
    axes = figure.subplots()
    axes.set_xticks(range(len(names)), names, parse_math=False)
    (line,) = axes.plot([0, 1])
    artifacts.legend(figure, {name: line for name in names})
    artifacts.save_figure(figure, path)
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == ticks
    assert figure.get_suptitle().replace("\n", " ") == " ".join(ticks)
    return ticks


@pytest.fixture
def fonts(monkeypatch):
    """The fonts that Matplotlib lists and those of the system, which are none; a list to add to."""
    from matplotlib import font_manager

    found = []
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: found)
    own = [font for font in font_manager.fontManager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    artifacts._warn_of_fonts.cache_clear()
    return found


def test_a_name_without_a_font_is_escaped_with_one_warning(fonts, tmp_path):
    with pytest.warns(UserWarning, match="no installed font has, and are escaped") as told:
        for _ in range(2):
            assert drawn(["\u732b", "na\u00efve", "$5"], tmp_path / "a.png") == [
                *("\\u732b", "na\u00efve", "$5")
            ]
    assert len(told) == 1


def test_a_name_is_drawn_by_a_font_that_has_its_characters(fonts, tmp_path):
    """Installed since Matplotlib made its list; one that is broken is passed over."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    for place in ((0, 0), (0, 900), (900, 900), (900, 0)):
        (pen.lineTo if place != (0, 0) else pen.moveTo)(place)
    pen.closePath()
    font = FontBuilder(1000)
    font.setupGlyphOrder([".notdef", "cat"])
    font.setupCharacterMap({0x732B: "cat"})
    font.setupGlyf(dict.fromkeys((".notdef", "cat"), pen.glyph()))
    font.setupHorizontalMetrics(dict.fromkeys((".notdef", "cat"), (1000, 0)))
    font.setupHorizontalHeader(ascent=900, descent=-100)
    font.setupNameTable({"familyName": "Tiny Test", "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(tmp_path / "tiny.ttf")
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    fonts += [str(tmp_path / "broken.ttf"), str(tmp_path / "tiny.ttf")]
    assert drawn(["\u732b", "dog"], tmp_path / "a.png") == ["\u732b", "dog"]


def test_a_title_is_wrapped_to_its_figure(tmp_path):
    figure = artifacts.figure(4, 3)
    title = figure.suptitle("a/folder/with-a-long-name.png " * 6 + "x" * 200, parse_math=False)
    figure.subplots()
    artifacts.save_figure(figure, tmp_path / "a.png")
    assert title.get_window_extent().width <= figure.bbox.width
    assert "".join(title.get_text().split()).endswith("x" * 200)


def test_long_names_at_ticks_are_shortened(tmp_path):
    figure = artifacts.figure(4, 3)
    axes = figure.subplots()
    axes.set_xticks([0, 1], ["cat", "x" * 33], parse_math=False)
    artifacts.save_figure(figure, tmp_path / "a.png")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["cat", "x" * 31 + "…"]


def test_cells_of_a_table_are_no_formulas(tmp_path):
    r"""Whatever else parts cells in a spreadsheet's language; numbers stay numbers."""
    for text in ("=1+1", "+a", "-cat", "@a", " =1", "\t=1", "\uff1d1", "cat;=1", "a\n=1"):
        (cell,) = next(csv.reader(io.StringIO(artifacts.csv_text([[text]]), newline="")))
        parts = re.split(r"[;\t\n]", cell)
        assert cell.replace("'", "") == text
        assert not any(part.lstrip()[:1] in tuple("=+-@\uff1d") for part in parts), text
    numbers = [-1, -0.5, "-1.25", "+3", "-1e-05", None, "a=b", "x-y"]
    artifacts.save_csv(tmp_path / "a.csv", [numbers])
    assert (tmp_path / "a.csv").read_text() == "-1,-0.5,-1.25,+3,-1e-05,,a=b,x-y\n"


def test_names_in_markdown_are_no_markup():
    html = re.compile(r"(?<!\\)<")
    for name in ("a`<b>", "``<b>", "<b>`", "a\n\n<b>", "`", "a``b`c", "\\`<b>"):
        span = artifacts.code(name)
        fence = re.match("`+", span)[0]
        inside = span.removeprefix(fence).removesuffix(fence)
        assert span == fence + inside + fence and "\n" not in span
        assert fence not in re.findall("`+", inside) and not inside.startswith("`")
        assert "\n" not in (text := artifacts.plain_markdown(name)) and not html.search(text)
    rows = artifacts.markdown([("a | b", "<img>"), ("c \\ d", "[x](y)")])
    assert rows.splitlines()[0] == r"| a \| b | \<img\> |"
    assert rows.splitlines()[2] == r"| c \ d | \[x\](y) |"


def test_the_folder_of_a_file_is_made_or_refused(tmp_path):
    artifacts.write_file(tmp_path / "new" / "folder" / "a", "x")
    with pytest.raises(ValueError, match="cannot be made a folder"):
        artifacts.write_file(tmp_path / "new" / "folder" / "a" / "b", "x")
    with pytest.raises(ValueError, match="no file can be made in /proc"):
        artifacts.write_file(Path("/proc/x"), "x")


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_only_regular_files_are_written(tmp_path, kind):
    path, target = tmp_path / "out.png", tmp_path / "target"
    target.write_text("precious")
    if kind == "link":
        path.symlink_to(target)
    else:
        {"fifo": os.mkfifo, "folder": os.mkdir}[kind](path)
    writes = (
        lambda: artifacts.write_file(path, "x"),
        lambda: artifacts.save_csv(path, [["x"]]),
        lambda: artifacts.append_to(path),
    )
    for write in writes:
        with pytest.raises(ValueError, match=r"out\.png is a link or no regular file"):
            write()
    assert target.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["out.png", "target"]


def test_nothing_else_writes_files():
    """Data, checkpoints and copies of buckets write into folders that they have just made.

    Mode 'x' follows no link.
    """
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "artifacts.py" or {"data", "checkpoint", "storage"} & {*path.parts}:
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
    raw = "cat\x1b[2J \x9b31m \u202edog\u2066 \ud800\nnext\tline ü 猫"
    shown = printable(raw)
    assert shown == (r"cat\x1b[2J \x9b31m \u202edog\u2066 \ud800" + "\nnext\tline ü 猫")
    assert printable(shown) == shown


def test_wilson_intervals():
    """Figures of Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    for right, total, ends in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605))):
        assert artifacts.wilson(right, total) == pytest.approx(ends, abs=5e-5)
    assert artifacts.wilson(0, 20) == (0, pytest.approx(0.1611, abs=5e-5))
    assert artifacts.wilson(29, 29) == (pytest.approx(0.8830, abs=5e-5), 1)
    assert artifacts.wilson(0, 0) == (0, 1)
    assert artifacts.accuracy_text(0.9, 90) == "90.00% (95% interval 82.1–94.6)"
    assert artifacts.accuracy_text(0.9, 10_000) == "90.00%"
