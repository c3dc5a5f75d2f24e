"""For the tests of the launchers: stand-ins for the programs that they start."""

import os
import subprocess
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
PATIENCE = 120  # seconds; a quiet machine needs one or two

# Exit codes of hsvit_jax.main that a launcher tells apart.
CODES = (0, 1, 2, 3, 42, 75, 130)


def program(folder: Path, name: str, text: str) -> Path:
    """An executable stand-in; `text` is bash."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def run(command: list, **options) -> subprocess.CompletedProcess:
    """Runs to the end, with the output as text; `env` is added to the environment."""
    env = {**os.environ, **options.pop("env", {})}
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=env,
        **options,
    )


def words_of(path: Path) -> list[str]:
    """Arguments that a stand-in recorded, one to a line."""
    return path.read_text().splitlines()
