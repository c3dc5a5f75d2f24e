"""`hsvit eval`: the run's own way of evaluating, whatever the words that name it."""

import pytest

from hsvit_jax import main
from hsvit_jax.weights import sources


@pytest.mark.parametrize(
    "words", [["--config=c2a2:digits,fast"], ["--config=c2a2:digits", "--config.eval.tta=flip"]]
)
def test_digits_are_never_mirrored(words, capsys):
    run = f"--checkpoint={sources.locate('zoo:c2a2-digits')}"
    assert main.main(["hsvit", "eval", run]) == 0
    alone = capsys.readouterr().out
    assert '"accuracy": ' in alone
    assert main.main(["hsvit", "eval", run, *words]) == 0
    assert capsys.readouterr().out == alone
