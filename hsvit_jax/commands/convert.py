"""Converts PyTorch weights to a checkpoint: `hsvit convert FILE [OUT]`."""

import json

from hsvit_jax import cli
from hsvit_jax.weights.convert import Disagreement, convert


def run(request: cli.Request) -> None:
    """Converts the file that the words name, and prints a line of JSON."""
    if len(request.words) not in (1, 2):
        raise cli.Misuse(f"expected FILE [OUT]; got {' '.join(request.words) or 'neither'}")
    if request.settings and request.config is None:
        raise cli.Misuse(f"--config.{request.settings[0]} needs --config=NETWORK")
    try:
        report = convert(*request.words, config=request.config, **request.flags.flag_values_dict())
    except Disagreement as error:
        print(json.dumps(error.report))
        raise
    print(json.dumps(report))
    if report.get("tolerance", 0) >= 1e-6:
        cli.note(
            f"note: an error below {report['tolerance']:g} of the largest logit goes unseen; with "
            "`logits_f64`, the logits computed in float64, one below 1e-9 does"
        )
    if report.get("batch_coupling"):
        cli.note(
            "note: as the reference computes it, an image's answer depends on the other images of "
            "its batch (model.batch_coupling=True)"
        )
