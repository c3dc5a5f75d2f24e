"""What a process tells itself before it starts: devices, huge pages."""

import os
import sys
import types

import pytest

from hsvit_jax import main
from hsvit_jax.runtime import cpu, signals


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
    cpu.use_huge_pages()
    words = [sys.executable, "-m", "hsvit_jax.main", "a", "b"]
    assert program.became == [(sys.executable, words)]
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.check=1:glibc.malloc.hugetlb=1"
    cpu.use_huge_pages()
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
    cpu.use_huge_pages()
    assert program.became == []


@pytest.mark.parametrize("words", ["-m hsvit_jax.main", "-m hsvit_jax", "somewhere/bin/hsvit"])
def test_every_program_is_known(program, monkeypatch, words):
    """A program unknown would only show in a step that takes 1.4 times as long."""
    monkeypatch.setattr(sys, "orig_argv", ["python", *words.split(), "a"])
    monkeypatch.setattr(signals, "prepare_process", lambda: None)
    monkeypatch.setattr(cpu, "prepare", lambda: sys.exit("prepared"))
    with pytest.raises(SystemExit, match="prepared"):
        main.main()
    assert program.became == [(sys.executable, [sys.executable, *words.split(), "a"])]


@pytest.mark.parametrize("number", ["", "abc", "2.0"])
def test_a_number_of_devices_that_is_none_is_named(monkeypatch, capsys, number):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", number)
    with pytest.raises(SystemExit) as ended:
        cpu.prepare()
    assert ended.value.code == 2
    assert f"JAX_NUM_CPU_DEVICES={number!r} is no whole number" in capsys.readouterr().err
