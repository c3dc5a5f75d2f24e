"""The README and docs/ say what is so: commands parse, links and names lead somewhere."""

import dataclasses
import importlib.util
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import hsvit_jax
from hsvit_jax import cli, get_config, main
from hsvit_jax.commands import COMMANDS
from hsvit_jax.config import schema
from hsvit_jax.models import FAMILIES
from hsvit_jax.studies.engine import System

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[lt]*/README.md"))
}


def commands() -> list[str]:
    """Every complete command of the pages but the log of changes, and of --help."""
    pages = (text for name, text in PAGES.items() if name != "CHANGELOG.md")
    joined = "\n".join(pages).replace("\\\n", " ")
    names = "|".join(COMMANDS)
    found = re.findall(rf"\b(hsvit_jax[\w.]* --[^`\n]*|hsvit(?:_jax)? (?:{names}) [^`\n]*)", joined)
    launched = re.findall(r" launch/\S+ (?:[^`\n]*? )??(--(?:mode|config)=[^`\n]*)", joined)
    found += [f"hsvit_jax {words}" for words in launched]
    for name, command in COMMANDS.items():
        found += [f"hsvit {name}{words}" for words in re.findall(r"(?m)^\$(.*)", command.examples)]
    return sorted({line for line in found if not re.search(r"[$…]|FILE|SPEC", line)})


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as Markdown renderers make them."""
    titles = re.findall(r"^#+ (.*)$", page, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_python_examples_run(tmp_path, monkeypatch):
    """Word for word, but for the size; the second goes on from what the first has trained."""
    monkeypatch.chdir(tmp_path)
    readme, _ = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)
    indented = [line[4:] for line in hsvit_jax.__doc__.splitlines() if line.startswith("    ")]
    for example in (readme, "\n".join(indented)):
        assert 'digits,tiny")' in example
        small = 'digits,tiny", "train.steps=2", "model.depth=1", "mesh.data=1", '
        small += '"model.embed_dim=8", "data.image_size=8,8")'
        names: dict = {}
        exec(example.replace('digits,tiny")', small), names)
        assert names["probabilities"].shape == (4, 10) and names["classifier"].step == 2
        assert abs(names["probabilities"].sum(1) - 1).max() < 1e-5
        assert (tmp_path / "runs" / "from-python" / "curves.png").exists()


def test_command_lines_are_accepted(tmp_path, monkeypatch, capsys):
    """Each is parsed to the end: flags, words after the colon, keys, and what the mode reads."""
    requests: list[cli.Request] = []
    for name, command in COMMANDS.items():
        monkeypatch.setitem(COMMANDS, name, dataclasses.replace(command, work=requests.append))
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(FAMILIES, "exchange", None)  # README's, forgotten after the test
    idea = tmp_path / "my_idea.py"
    idea.write_text(re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)[1])
    assert len(commands()) > 30
    for line in commands():
        line = line.replace("=my_idea.py", f"={idea}")
        program, *words = shlex.split(line, comments=True)
        assert main.main([program, *words]) == 0, (line, capsys.readouterr().err)
        request = requests.pop()
        if request.name == "compare":
            for system in map(System.parse, request.words):
                get_config(system.spec, *request.settings, *system.settings)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    here = (ROOT / page).parent
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        there = (here / path).resolve() if path else ROOT / page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text("utf-8")), target


def test_names_exist():
    """Files, tests, targets of make and keys of a configuration that the pages name."""
    text = "\n".join(PAGES.values())
    files = set(re.findall(r"\b(?:configs|docs|tests|launch|hsvit_jax)/[\w./-]*\w", text))
    assert len(files) > 30
    assert not [name for name in files if not (ROOT / name).exists() and "NAME" not in name]
    sources = "\n".join(path.read_text("utf-8") for path in ROOT.glob("tests/**/*.py"))
    tests = set(re.findall(r"`(?:[\w./]*::)?(test_\w+)`", text))
    assert len(tests) > 20
    assert not [name for name in tests if f"def {name}(" not in sources]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)(?=`|  )", text))
    assert {"quickstart", "test", "test-slow", "docs"} <= targets
    assert not [name for name in targets if f"\n{name}:" not in makefile]
    known = {*schema.KEYS, *schema.all_keys(), *schema.LABELS}
    known |= {"model.safetensors", "config.json", "report.html"}  # files
    rooms = {path.stem for path in (ROOT / "hsvit_jax").iterdir()}
    sections = "|".join(rooms | {name.partition(".")[0] for name in known})
    named = set(re.findall(rf"`((?:{sections})(?:\.[A-Za-z]\w*)+)(?=[=`(])", text))
    assert len(named) > 60
    for name in sorted(named - known):
        assert pkgutil.resolve_name(f"hsvit_jax.{name}"), name


def test_tables_of_the_code_are_current():
    """`python docs/generate.py` would change nothing; every key and room is there."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for page, text in PAGES.items():
        assert generate.regenerated(text) == text, f"{page}: run python docs/generate.py"
    for name in (*schema.LABELS, *schema.all_keys()):
        assert f"\n| `{name}` | " in PAGES["docs/configuration.md"], name
    rows = re.findall(r"\n\| `(?:model\.)?\w.*", PAGES["docs/configuration.md"])
    assert len(rows) > 150 and len(rows) == len(set(rows))
    house = re.split("\n## ", PAGES["docs/architecture.md"])
    (described,) = (part for part in house if part.startswith("Map"))
    assert {*re.findall("`(\\w+)`", described)} >= {
        room for _, rooms, _ in generate.FLOORS for room in rooms.split()
    }


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 140


def test_docstrings_are_markdown():
    """`[i][j]` outside backticks is a link to nowhere, with which `make docs` fails."""
    for path in (ROOT / "hsvit_jax").rglob("*.py"):
        for text in re.findall('"""(.*?)"""', path.read_text("utf-8"), re.DOTALL):
            assert not re.search(r"\[[^][]+\]\[[^][]*\]", re.sub("`[^`]*`", "", text)), path
