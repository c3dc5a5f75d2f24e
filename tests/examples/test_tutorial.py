"""Runs every command of docs/tutorial.md in its order, with short trainings."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = re.findall(r"(?m)^    (\w.*)$", (ROOT / "docs/tutorial.md").read_text("utf-8"))
#: Ends a training after two steps on small images.
SHORT = ["--config.train.steps=2", "--config.data.image_size=32,32"]


def start(line: str, folder: Path) -> subprocess.Popen:
    """Starts a command of the tutorial in a folder."""
    program, *words = shlex.split(line, comments=True)
    if program == "hsvit":
        command = [sys.executable, "-m", "hsvit_jax", *words]
        command += SHORT * (words[0] == "train" and "tiny" not in line)
    elif program == "python":
        command = [sys.executable, ROOT / words[0], *words[1:]]
    else:
        command = [program, "--silent", *words]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=pipe, stderr=pipe
    )


def test_the_commands_run(tmp_path):
    server, answers = None, {}
    try:
        for line in COMMANDS:
            process = start(line, tmp_path)
            if line.startswith("hsvit serve"):
                server = process
                while "http://" not in (text := server.stderr.readline()):
                    assert text, "the server has ended"
                continue
            out, error = process.communicate(timeout=600)
            assert process.returncode == 0, (line, error)
            answers[line.split()[1]] = out
    finally:
        if server:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    assert len(answers["predict"].splitlines()) == 1 + 3 * 81
    assert json.loads(answers["-F"])["predictions"][0]["votes"] == {"voted": 16, "of": 16}
    assert (tmp_path / "runs/mine/report.html").exists()
    assert (tmp_path / "mine.safetensors").exists()
    assert list((tmp_path / "views").glob("*.png"))
