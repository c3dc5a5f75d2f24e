"""hsvit visualize: PNGs of attention, feature maps and votes of a trained network."""

from pathlib import Path

from hsvit_jax.cli import MESH, Command, Request, define_path
from hsvit_jax.commands.trained import JOB, RUN, load_classifier

COMMAND = Command(
    "Draws feature maps, votes and attention maps of images.",
    __name__,
    "$ runs/c2a2-digits-strong-seed0 cat.jpg --out=views",
    (*RUN, JOB, (define_path, "out", "views", "Folder of the PNGs.")),
    config=MESH,
    words="IMAGE ...",
)


def run(request: Request) -> int:
    """Writes PNGs and prints their names; returns 1 where a file is no image."""
    from hsvit_jax.classifier import figures, files
    from hsvit_jax.runtime import coordination
    from hsvit_jax.text import printable
    from hsvit_jax.train.workdir import check_apart

    paths, out = files.listed(request.words), Path(request.flags.out)
    if taken := {path.resolve() for path in paths} & figures.names(paths, out.resolve()):
        raise ValueError(
            f"--out={out} could overwrite the image {min(taken)}: choose another folder"
        )
    network = load_classifier(request)
    check_apart(network.config.data.name, out, "--out")
    written, errors = figures.write(network, paths, out)
    if coordination.is_lead():
        for path in written:
            print(printable(str(path)))
    for error in errors:
        coordination.print_once(error)
    return 1 if errors else 0
