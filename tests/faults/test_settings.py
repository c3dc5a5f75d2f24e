"""Settings that no run can have: a line and an exit code within seconds, and nothing is left."""

import pytest
from support.processes import run_main


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (
            ["--config.optim.beta1=5"],
            2,
            "optim.beta1 must be a number from 0, below 1; got '5' (it was 0.9)",
        ),
        (
            ["--config.model.embed_dim=65536", "--config.model.groups=1"],
            1,
            "training c2a2 with its 34,",
        ),
    ],
)
def test_a_setting_that_no_run_can_have(words, code, line, tmp_path):
    done = run_main("--config=c2a2:digits,tiny", *words, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (code, "")
    first, *rest = done.stderr.splitlines()
    assert first.startswith(line) and len(rest) == code - 1  # code 2: and where help is
    assert list(tmp_path.iterdir()) == []
