"""hsvit visualize: PNGs of attention, feature maps and votes of a trained network.

The arrays are intermediate activations of the forward pass (`Network.views`), reduced here to the
views of the literature. G groups, N heads, T tokens, K classes.

Source: DHVT supplement, figures 3 to 5 and 7 (attention); HVT paper, figure 3 (feature maps);
HSViT paper, section 3.1 (one token per kernel, averaged votes).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hsvit_jax import augment, cli, data, report
from hsvit_jax.classifier import Classifier
from hsvit_jax.cli import Request
from hsvit_jax.commands import visualize_figures
from hsvit_jax.commands.predict import image_files, load_classifier
from hsvit_jax.commands.views import Groups, Sequences, Views


def run(request: Request) -> int:
    """Writes PNGs and prints their names; returns 1 where a file is no image."""
    files = image_files(request.words, request.name)
    out = Path(request.flags.out)
    written, errors = write_views(load_classifier(request), files, out)
    for path in written:
        print(report.printable(str(path)))
    for error in errors:
        cli.note(error)
    return 1 if errors else 0


class Viewer:
    """Runs a classifier's network on images and returns its views; compiled once."""

    def __init__(self, classifier: Classifier) -> None:
        self._classifier = classifier
        mean, std = tuple(classifier.config.data.mean), tuple(classifier.config.data.std)

        def views(params: dict, stats: dict, image_HWC: jax.Array) -> dict[str, list[jax.Array]]:
            x_BHWC = augment.normalise(image_HWC[None], mean, std)
            return classifier.model.views(params, stats, x_BHWC)

        self._views = jax.jit(views)

    def __call__(self, image_HWC: np.ndarray) -> Views:
        """Runs the network on one uint8 image of its size.

        Raises ValueError for a network that has nothing to show.
        """
        c = self._classifier
        arrays = jax.device_get(self._views(c.params, c.stats, image_HWC))
        if not set(arrays) - {"logits"}:
            model = c.config.model
            mixer = f" with mixer={model.mixer!r}" if "mixer" in model else ""
            raise ValueError(
                f"{model.variant} ({model.family}){mixer} has nothing to show: neither attention "
                "weights nor groups nor tokens at known places. Visualize a network with softmax "
                "attention, an hsvit, or a family of vix, pix, hvt, deit and dhvt"
            )
        return views_of(c.model, arrays, 0)


def views_of(model: Any, arrays: dict[str, list[np.ndarray]], example: int) -> Views:
    """Selects one example from a batch's views, `model.views` as NumPy arrays."""
    groups = {"votes", "group attention"}  # their first axis is groups, the second the batch
    one = {
        kind: [x[:, example] if kind in groups else x[example] for x in of_kind]
        for kind, of_kind in arrays.items()
    }
    return Views(
        logits_K=one["logits"][0],
        votes_GK=one["votes"][0] if "votes" in one else None,
        groups=_groups(one) if "maps" in one else None,
        sequences=_sequences(model, one),
    )


def _groups(arrays: dict[str, list[np.ndarray]]) -> Groups:
    """Feature maps by group; the maps of towers are concatenated."""
    maps_CHW = np.concatenate([m.transpose(2, 0, 1) for m in arrays["maps"]])
    attention = arrays.get("group attention")
    if attention is None:  # no attention: one group, equal shares
        shares = np.full((1, len(maps_CHW)), 1 / len(maps_CHW), np.float32)
    else:
        depth = len(attention) // len(arrays["maps"])  # blocks of a tower
        last = np.concatenate(attention[depth - 1 :: depth])
        shares = last[:, :, 0, 1:].mean(1)
    return Groups(maps_CHW.reshape(*shares.shape, *maps_CHW.shape[1:]), shares)


def _sequences(model: Any, arrays: dict[str, list[np.ndarray]]) -> Sequences | None:
    """Attention and features of at most four blocks, evenly chosen among those with a token grid.

    Head tokens (the setting `head_tokens`) follow the patches in the sequence.
    """
    c = model.config
    extra = c.heads if getattr(c, "head_tokens", False) else 0
    attention = arrays.get("attention", [])
    lengths = [w.shape[-1] - extra for w in attention]
    shown = spread_out([i for i, t in enumerate(lengths) if model.grid(t) is not None])

    def on_patches(weights_NS: np.ndarray, tokens: int) -> np.ndarray:
        """Attention by key → (N, rows, columns)."""
        placed = model.at_places(weights_NS[None, :, :tokens].swapaxes(1, 2))
        return np.asarray(placed)[0].transpose(2, 0, 1)

    before = model.grid(lengths[shown[0]])[0] if shown else 0
    by_head, matrices, head_tokens = [], [], []
    for i in shown:
        weights_NTS, tokens = attention[i], lengths[i]
        query_NS = weights_NTS[:, 0] if before else weights_NTS[:, :tokens].mean(1)
        by_head.append(on_patches(query_NS, tokens))
        matrices.append(weights_NTS.mean(0))
        if extra:
            heads = np.arange(extra)
            head_tokens.append(on_patches(weights_NTS[heads, tokens + heads], tokens))
    placed = {}
    for i, x_TD in enumerate(arrays.get("tokens", [])):
        features = model.at_places(x_TD[None])
        if features is not None:
            placed[i] = np.asarray(features)[0]
    features = spread_out(list(placed))
    if not shown and not features:
        return None
    return Sequences(
        blocks=[i + 1 for i in shown],
        queries="CLS" if before else "mean of all tokens",
        before=before,
        attention=by_head,
        matrices=matrices,
        head_tokens=head_tokens,
        feature_blocks=[i + 1 for i in features],
        features=[placed[i] for i in features],
    )


def spread_out(items: list[int], most: int = 4) -> list[int]:
    """At most `most` items, evenly spaced from the second to the last but one of a long list."""
    if len(items) <= most:
        return items
    ends = (1, len(items) - 2) if len(items) >= 2 * most else (0, len(items) - 1)
    return [items[round(i)] for i in np.linspace(*ends, most)]


def write_views(
    classifier: Classifier, paths: Sequence[Path], out: Path
) -> tuple[list[Path], list[str]]:
    """Writes the PNGs of every image file.

    Args:
      classifier: the trained network.
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
    viewer, written, errors = Viewer(classifier), [], []
    names = classifier.class_names
    for path, stem in zip(paths, _stems(paths), strict=True):
        try:
            image_HWC = classifier.read(path)
        except data.BadImage as error:
            errors.append(str(error))
            continue
        views = viewer(image_HWC)
        out.mkdir(parents=True, exist_ok=True)
        for kind, figure in visualize_figures.figures(
            views, image_HWC, names, str(Path(*path.parts[-2:]))
        ):
            written.append(out / f"{stem}-{kind}.png")
            report.save_figure(figure, written[-1])
    return written, errors


def _stems(paths: Sequence[Path]) -> list[str]:
    """A unique file name stem for each image, numbered where images share a name."""
    taken: dict[str, int] = {}
    out = []
    for path in paths:
        taken[path.stem] = number = taken.get(path.stem, 0) + 1
        stem = path.stem if number == 1 else f"{path.stem}-{number}"
        while number > 1 and stem in taken:
            number += 1
            stem = f"{path.stem}-{number}"
        taken.setdefault(stem, 1)
        out.append(stem)
    return out
