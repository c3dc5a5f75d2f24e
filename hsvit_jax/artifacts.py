"""Results as text, Markdown tables, CSV files and figures, written whole and through no link."""

import contextlib
import csv
import functools
import io
import math
import os
import re
import secrets
import stat
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hsvit_jax.text import printable

# A link fails to open, a fifo without a partner does not wait.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# Where a spreadsheet may begin to read a formula: in a cell, and behind what parts cells elsewhere.
_FORMULA = re.compile(r"(^|[;\t\r\n])(?=\s*[=+\-@＝＋－＠])")

# What begins markup in Markdown, HTML's too.
_MARKUP = re.compile(r"\\(?=[!-/:-@\[-`{-~])|[`*<>\[\]&|]")

_TICK = 32  # characters of a name at a tick
_FEW = 10_000  # images, below which an accuracy is printed with its interval


def wilson(right: float, total: int) -> tuple[float, float]:
    """Computes Wilson's 95 % score interval of a proportion; (0, 1) where nothing was counted.

    Source: Wilson, Journal of the American Statistical Association 22 (1927), 209-212.

    >>> tuple(round(end, 3) for end in wilson(81, 90))
    (0.821, 0.946)
    """
    if not total:
        return 0.0, 1.0
    p, z2n = right / total, 1.959964**2 / total
    half = math.sqrt(z2n * (p * (1 - p) + z2n / 4))
    ends = ((p + z2n / 2 + side) / (1 + z2n) for side in (-half, half))
    low, high = (min(max(end, 0.0), 1.0) for end in ends)
    return low, high


def interval(accuracy: float, examples: int) -> tuple[float, ...]:
    """The Wilson interval of an accuracy on fewer than 10,000 images; () for more."""
    return wilson(accuracy * examples, examples) if examples < _FEW else ()


def accuracy_text(accuracy: float, examples: int, spread: str = "") -> str:
    """Formats an accuracy and its `spread` over seeds, with its interval where images are few.

    >>> accuracy_text(0.9, 90)
    '90.00% (95% interval 82.1–94.6)'
    """
    ends = "–".join(f"{100 * end:.1f}" for end in interval(accuracy, examples))
    return f"{accuracy:.2%}{spread}" + (f" (95% interval {ends})" if ends else "")


def refuse_special(path: Path) -> None:
    """Raises ValueError for a link, a folder, a fifo or a device; a missing file is no mistake."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(
                f"{path} is a link or no regular file, and nothing is written through it: remove "
                "it, or choose another folder"
            )


def append_to(path: Path) -> IO[bytes]:
    """Opens a regular file for adding to its end, following no link and waiting for nobody.

    Args:
      path: the file, made if it is not there.

    Returns:
      an unbuffered binary file.

    Raises:
      ValueError: `path` is a link, a folder, a fifo or a device.
    """
    refuse_special(path)
    return open(
        path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags | _SAFELY, 0o666)
    )


def make_folder(path: Path) -> None:
    """Makes a folder, and those around it. Raises ValueError where none can be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        raise ValueError(
            f"{path} cannot be made a folder: {error.strerror}; name another place"
        ) from None


def prepare_for(path: Path) -> None:
    """Makes the folder of a file to be written. Raises ValueError as `write_file` does."""
    make_folder(path.parent)
    refuse_special(path)


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all: beside it first, then renamed over it.

    Args:
      path: the file; an existing one is replaced, a missing folder made.
      content: bytes, or text to be written as UTF-8.

    Raises:
      ValueError: `path` is a link, a folder, a fifo or a device, or in no possible folder.
    """
    prepare_for(path)
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:  # a new file: no link is there to be followed
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except FileNotFoundError:  # as below /proc
        raise ValueError(f"no file can be made in {path.parent}: name another place") from None
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = os.fspath(path)
        part.unlink(missing_ok=True)
        raise


def filled(template: Path, **values: Any) -> str:
    """Fills in a Jinja template; in HTML every text is escaped.

    Args:
      template: the file.
      values: what the template names. Control characters of texts are escaped.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=template.suffix == ".html",
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
    )
    return environment.from_string(template.read_text("utf-8")).render(values)


def figure(width: float, height: float, *, dpi: int = 120) -> Any:
    """An empty Matplotlib figure, in inches, that lays out its panels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def legend(figure: Any, drawn: Mapping[str, Any], title: str = "") -> None:
    """Adds a legend beside the panels: what is drawn, by names of any characters."""
    numbers = map(str, range(len(drawn)))  # Matplotlib leaves out labels such as _name
    made = figure.legend(
        drawn.values(), numbers, title=title, loc="outside right upper", fontsize=8
    )
    for text, name in zip((made.get_title(), *made.texts), (title, *drawn), strict=True):
        text.set(text=printable(name), parse_math=False)


def save_figure(figure: Any, path: Path) -> None:
    """Writes a Matplotlib figure in the format of the file's suffix, as `write_file` does.

    Its titles are wrapped to its width, and the names at its ticks are shortened.
    """
    from matplotlib import rc_context

    image = io.BytesIO()
    with rc_context({"text.usetex": False}):  # the user's, by which a name and a % would be TeX
        _find_fonts(figure)
        for axis in (one for axes in figure.axes for one in (axes.xaxis, axes.yaxis)):
            names = [text.get_text() for text in axis.get_ticklabels()]
            if max(map(len, names), default=0) > _TICK:
                axis.set_ticklabels([n if len(n) <= _TICK else f"{n[: _TICK - 1]}…" for n in names])
        for text in figure.texts:
            whole = text.get_text()
            columns = len(whole)
            while columns > 8 and text.get_window_extent().width > 0.98 * figure.bbox.width:
                columns -= 1 + columns // 20
                text.set_text(textwrap.fill(whole, columns))
        figure.savefig(image, format=path.suffix[1:])
    write_file(path, image.getvalue())


def _find_fonts(figure: Any) -> None:
    """Adds the fonts that have the characters of a figure; escapes what no installed one has."""
    from matplotlib import font_manager
    from matplotlib.text import Text

    manager, texts, fonts = font_manager.fontManager, figure.findobj(Text), {}
    lacking = {c for text in texts for c in text.get_text()} - {"\n"}
    lacking -= _characters(manager.findfont(font_manager.FontProperties()))
    if lacking:
        new = {*font_manager.findSystemFonts()} - {font.fname for font in manager.ttflist}
        for path in new:  # since Matplotlib has listed them
            with contextlib.suppress(Exception):  # it raises many kinds for a font it cannot use
                manager.addfont(path)
        real = [font for font in manager.ttflist if "Last Resort" not in font.name]
        fonts = {font.name: lacking & _characters(font.fname) for font in real}
    families = sorted(filter(fonts.get, fonts), key=lambda name: -len(fonts[name]))
    for text in texts:
        text.set(usetex=False, family=[*text.get_family(), *families])
    if not (lacking := lacking.difference(*fonts.values())):
        return
    table = {ord(c): c.encode("unicode_escape").decode() for c in lacking}
    for axis in (one for axes in figure.axes for one in (axes.xaxis, axes.yaxis)):
        names = [text.get_text() for text in axis.get_ticklabels()]
        if lacking & {*"".join(names)}:  # the axis sets them again as it is drawn
            axis.set_ticklabels([name.translate(table) for name in names])
    for text in texts:
        text.set_text(text.get_text().translate(table))
    _warn_of_fonts()


@functools.cache
def _characters(font: str) -> frozenset[str]:
    """All that a font file has a glyph for."""
    from matplotlib.font_manager import get_font

    return frozenset(map(chr, get_font(font).get_charmap()))


@functools.cache  # once
def _warn_of_fonts() -> None:
    warnings.warn(
        "names in pictures hold characters that no installed font has, and are escaped there: "
        "install a font that has them, such as Noto Sans CJK for Chinese",
        stacklevel=2,
    )


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Formats rows of cells as CSV. A text that a spreadsheet would compute begins with `'`."""

    def plain(cell: Any) -> Any:
        with contextlib.suppress(ValueError, TypeError):
            float(cell)  # a number stays one
            return cell
        return _FORMULA.sub(r"\1'", cell) if isinstance(cell, str) else cell

    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(map(plain, row) for row in rows)
    return text.getvalue()


def save_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Writes rows of cells as `csv_text` formats them, the header first, as `write_file` does."""
    write_file(path, csv_text(rows))


def table(columns: Mapping[str, Callable[[Any], str]], rows: Iterable[Any]) -> list[tuple]:
    """Formats rows of any kind: the head, then the cells of each row.

    >>> table({"n": str, "half": lambda n: f"{n / 2:.2f}"}, [1, 2])
    [('n', 'half'), ('1', '0.50'), ('2', '1.00')]
    """
    return [tuple(columns), *(tuple(cell(row) for cell in columns.values()) for row in rows)]


def plain_markdown(text: str) -> str:
    """Escapes a text for Markdown, in one line, so that it is no markup or HTML there."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(printable(text).split()))


def code(text: str) -> str:
    """Formats a text as a code span of Markdown, which no backtick or newline in it ends."""
    text = " ".join(printable(text).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    side = " " * (not text or "`" in text[0] + text[-1])
    return f"{fence}{side}{text}{side}{fence}"


def markdown(table: Sequence[Sequence[str]]) -> str:
    """Formats a table, the head first, as Markdown: the first column flush left, others right."""
    rule = ["---", *["---:"] * (len(table[0]) - 1)]
    lines = [[plain_markdown(cell) for cell in cells] for cells in table]
    lines.insert(1, rule)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def aligned(table: list[tuple[str, ...]]) -> list[str]:
    """Formats rows in aligned columns: the first flush left, the others flush right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return [lines[0], rule, *lines[1:]]


def byte_text(count: int) -> str:
    """Formats a number of bytes in binary units, with four figures."""
    power = max(p for p in range(5) if p == 0 or count >= 1024**p)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
