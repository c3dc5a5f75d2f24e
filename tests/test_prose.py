"""Pages, docstrings and messages follow the rules of CONTRIBUTING.md that can be checked."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
STARTS = re.compile("(Of|Which|Whose|Where|None|As|By)\\b")
BANNED = r"told|tells?|says? of|said|reads \d|at hand|mends|strangers?|dear|of one's own|by hand"
BANNED += r"|goes on|go on|as it is|in place of|alike|likewise|none but|le(?:ft|aves?) out"


def literals(path: Path) -> list[str]:
    """Returns a module's docstrings and the constant text of the errors that it raises."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    raised = [n for node in nodes if isinstance(node, ast.Raise) for n in ast.walk(node)]
    documented = (n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
    texts = [n.value for n in raised if isinstance(n, ast.Constant)]
    return [str(t) for t in (*texts, *map(ast.get_docstring, documented)) if t]


def test_prose_follows_the_rules():
    """Lists every violation at once."""
    sources = (ROOT / "hsvit_jax").rglob("*.py")
    texts = [(path, text) for path in sources for text in literals(path)]
    faults = [f"{path}: first word: {text[:60]}" for path, text in texts if STARTS.match(text)]
    for page in {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[lt]*/*.md")}:
        whole = re.sub("```.*?```", "X", page.read_text("utf-8"), flags=re.S)
        text = re.sub(r"(?m)^    .*$|`[^`]*`", "X", whole)
        texts.append((page, text))
        if page.parent.name != "log" and page.name != "CHANGELOG.md":
            prose = re.sub(r"(?m)^([|#!<].*)?$|\]\([^)]*\)|^\d+\. ", "\n\n", text)
            sentences = re.split(r"[.!?](?=\s)|\n\n+|\n- ", prose)
            faults += [f"{page}: too long: {s[:60]}" for s in sentences if len(s.split()) > 30]
    for path, text in texts:
        faults += [f"{path}: {found}" for found in re.findall(rf"\b(?:{BANNED})\b", text)]
    assert not faults, "\n" + "\n".join(sorted(faults))
