"""What a process tells itself before it starts: huge pages."""

import os
import runpy
import subprocess
import sys
import types

import pytest

from hsvit_jax.runtime import compile_cache, cpu, signals


@pytest.fixture
def program(monkeypatch, tmp_path):
    """A process that was started as `python -m hsvit_jax.main a b`, and what it would become."""
    pages = tmp_path / "enabled"
    pages.write_text("always [madvise] never\n")
    monkeypatch.setattr(cpu, "_HUGE_PAGES", str(pages))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "hsvit_jax.main", "a", "b"])
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    became = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append((path, words)))
    return types.SimpleNamespace(became=became, pages=pages)


def test_it_starts_once_more_with_huge_pages(program, monkeypatch):
    """Once: the second time the tunable is there. Other tunables stay."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    cpu.use_huge_pages("hsvit_jax.main")
    words = [sys.executable, "-m", "hsvit_jax.main", "a", "b"]
    assert program.became == [(sys.executable, words)]
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.check=1:glibc.malloc.hugetlb=1"
    cpu.use_huge_pages("hsvit_jax.main")
    assert len(program.became) == 1


@pytest.mark.parametrize("case", ["always", "no file", "notebook", "import", "theirs", "refused"])
def test_it_stays_as_it_is_otherwise(program, monkeypatch, case):
    """Pages are huge anyway, or never; another program's process; the user's own choice."""
    if case == "always":
        program.pages.write_text("[always] madvise never\n")
    elif case == "no file":
        program.pages.unlink()
    elif case == "notebook":
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ipykernel_launcher", "-f", "x"])
    elif case == "import":
        monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "import hsvit_jax.main"])
    elif case == "theirs":
        monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    else:
        monkeypatch.setenv("HSVIT_HUGE_PAGES", "0")
    cpu.use_huge_pages("hsvit_jax.main")
    assert program.became == []


@pytest.mark.parametrize("module", ["main", "compare", "benchmark", "benchmark.step_growth"])
def test_every_program_names_itself(program, monkeypatch, module):
    """A wrong name would only show in a step that takes 1.4 times as long."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", f"hsvit_jax.{module}", "a"])
    monkeypatch.setattr(cpu, "prepare", lambda: sys.exit("prepared"))
    monkeypatch.setattr(compile_cache, "remember_compilations", lambda: None)
    for name in ("prepare_process", "raise_on_ctrl_c"):
        monkeypatch.setattr(signals, name, lambda: None)
    for name in (module, f"{module}.__main__"):
        monkeypatch.delitem(sys.modules, f"hsvit_jax.{name}", raising=False)
    with pytest.raises(SystemExit, match="prepared"):
        runpy.run_module(f"hsvit_jax.{module}", run_name="__main__")
    assert program.became == [(sys.executable, [sys.executable, "-m", f"hsvit_jax.{module}", "a"])]


def test_the_command_line_is_the_same_process_with_the_same_words(tmp_path):
    """For real: the usage text and exit code come through, whatever the machine's pages are."""
    done = subprocess.run(
        [sys.executable, "-m", "hsvit_jax.main"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stdout.startswith("usage: python -m hsvit_jax.main")
