"""Counts the lines of code that check input, by room of the package.

    python tools/count_validation.py [ROOT]

Counted are guards (an `if` whose body only raises or warns), handlers that raise another error,
functions called check, refuse or validate, and calls of those. Docstrings, comments and blank lines
are not code.
"""

import ast
import collections
import io
import re
import sys
import tokenize
from pathlib import Path

_CHECK = re.compile(r"_?(check|refuse|validate)(_|$)")


def code_lines(text: str) -> set[int]:
    """Returns the numbers of the lines that hold code."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*layout, tokenize.ENDMARKER):
            found |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        value = getattr(first, "value", None) if isinstance(first, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found -= {*range(first.lineno, first.end_lineno + 1)}
    return found


def _name(call: ast.AST) -> str:
    function = getattr(call, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def _refuses(statement: ast.stmt) -> bool:
    warns = isinstance(statement, ast.Expr) and _name(statement.value) == "warn"
    return isinstance(statement, ast.Raise) or warns


def _calls_check(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and bool(_CHECK.match(_name(statement.value)))


def validation_lines(text: str) -> set[int]:
    """Returns the numbers of the lines that check input."""
    found: set[int] = set()

    def add(first: ast.AST, last: ast.AST) -> None:
        found.update(range(first.lineno, last.end_lineno + 1))

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and _CHECK.match(node.name):
            add(node, node)
        elif isinstance(node, ast.If) and _refuses(node.body[-1]):
            simple = all(isinstance(part, ast.Assign | ast.Raise | ast.Expr) for part in node.body)
            if simple:
                add(node, node.body[-1])
        elif isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise):
            if node.body[-1].exc is not None:
                add(node, node)
        elif isinstance(node, ast.stmt) and (_refuses(node) or _calls_check(node)):
            add(node, node)
    return found & code_lines(text)


def main(root: Path) -> None:
    """Prints a line for each room, and the sum."""
    code, checks = collections.Counter(), collections.Counter()
    for path in sorted(root.rglob("*.py")):
        room = path.relative_to(root).parts[0].removesuffix(".py")
        text = path.read_text("utf-8")
        code[room] += len(code_lines(text))
        checks[room] += len(validation_lines(text))
    for room, count in checks.most_common():
        print(f"{room:14}{count:6,} of {code[room]:6,}  {count / code[room]:6.1%}")
    total, whole = checks.total(), code.total()
    print(f"{'all':14}{total:6,} of {whole:6,}  {total / whole:6.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "hsvit_jax"))
