"""hsvit visualize: PNGs of attention, feature maps and votes of a trained network."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from hsvit_jax import artifacts, data
from hsvit_jax.classifier import Classifier, figures
from hsvit_jax.cli import Request
from hsvit_jax.commands.predict import image_files, load_classifier
from hsvit_jax.runtime import coordination
from hsvit_jax.text import printable
from hsvit_jax.train.workdir import check_apart

_KINDS = ("votes", "maps", "looks", "matrices", "heads", "features")


def run(request: Request) -> int:
    """Writes PNGs and prints their names; returns 1 where a file is no image."""
    files = image_files(request.words, request.name)
    out = Path(request.flags.out)
    for folder in filter(os.path.isdir, request.words):
        if out.resolve().is_relative_to(Path(folder).resolve()):
            raise ValueError(
                f"--out={out} lies in {folder}, and its pictures would be taken for images of it "
                "the next time: give an --out outside"
            )
    drawn = {out.resolve() / f"{stem}-{kind}.png" for stem in _stems(files) for kind in _KINDS}
    for path in files:
        if path.resolve() in drawn:
            raise ValueError(
                f"--out={out} could write a picture over {path}, one of the images: give another"
            )
    network = load_classifier(request)
    check_apart(network.config.data.name, out, "--out")
    written, errors = write_views(network, files, out)
    if coordination.is_lead():
        for path in written:
            print(printable(str(path)))
    for error in errors:
        coordination.print_once(error)
    return 1 if errors else 0


def write_views(
    classifier: Classifier, paths: Sequence[Path], out: Path
) -> tuple[list[Path], list[str]]:
    """Writes the PNGs of every image file.

    Args:
      paths: image files.
      out: folder of the PNGs NAME-votes.png, -maps, -looks, -matrices, -heads and -features, those
        that the network has.

    Returns:
      the paths of the PNGs, and the errors of files that are no images.

    Raises:
      ValueError: the network has nothing to show, or `out` is a file.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out={out} is a file; hsvit visualize writes a folder of PNGs")
    network = f" by {classifier.config.model.variant}, step {classifier.step:,}"
    views_too = classifier.config.eval.tta != "none"
    alone = ", without its other views" if views_too else ""  # which predict averages
    written, errors, names = [], [], classifier.class_names
    for path, stem in zip(paths, _stems(paths), strict=True):
        image_HWC = None
        try:
            image_HWC = classifier.read(path)
        except data.BadImage as error:
            errors.append(str(error))
        coordination.check_same("list of images", "" if image_HWC is None else str(path))
        if image_HWC is None:
            continue
        views = classifier.explain(image_HWC[None])[0]
        if not coordination.is_lead():
            continue
        for kind, figure in figures.figures(
            views, image_HWC, names, printable(f"{Path(*path.parts[-2:])}{network}{alone}")
        ):
            written.append(out / f"{stem}-{kind}.png")
            artifacts.save_figure(figure, written[-1])
    return written, errors


def _stems(paths: Sequence[Path]) -> list[str]:
    """A unique file name stem for each image, numbered where images share a name."""
    taken: set[str] = set()  # without capitals, which make no other file on macOS and Windows
    out = []
    for path in paths:
        names = itertools.chain([path.stem], (f"{path.stem}-{n}" for n in itertools.count(2)))
        out.append(next(name for name in names if name.casefold() not in taken))
        taken.add(out[-1].casefold())
    return out
