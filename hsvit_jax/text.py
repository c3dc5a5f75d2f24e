"""Words for messages: short lists, near names, and texts that any terminal can print."""

import difflib
import re
import sys
import unicodedata
from collections.abc import Iterable

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def few(words: Iterable[object], separator: str = ", ") -> str:
    """Joins the first five words and counts the rest.

    >>> few([]), few("ab"), few(range(7))
    ('none', 'a, b', '0, 1, 2, 3, 4 and 2 more')
    """
    listed = [one_line(word) for word in words]
    more = f" and {len(listed) - 5:,} more" if len(listed) > 5 else ""
    return (separator.join(listed[:5]) or "none") + more


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggests the closest known word: ' Did you mean …?', or nothing."""
    close = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f" Did you mean {close[0]}?" if close else ""


def printable(text: str) -> str:
    r"""Escapes control characters of a text for a terminal; newlines and tabs stay.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def note(text: str) -> None:
    """Prints a remark to standard error; standard output is for results."""
    print(printable(text), file=sys.stderr, flush=True)


def one_line(name: object) -> str:
    """Returns a name in one line that any terminal can print: control characters are escaped."""
    return "".join(c if is_printable(c) else ascii(c)[1:-1] for c in str(name))


def is_printable(name: str) -> bool:
    """Returns whether a name has no control characters and only valid UTF-8."""
    return not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name)
