"""Where a trained network looks in given images: `--mode=visualize`, PNGs.

The arrays come from the network's own pass (`Network.views`); here they are cut to what the
literature shows. Legend as in the models: G groups, N heads, T tokens, K classes.

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
from hsvit_jax.commands.views import Groups, Look, Sequences


def run(request: Request) -> int:
    """Writes PNGs and prints their names; 1 where a file is no image."""
    files = image_files(request.words, request.flags.mode)
    out = Path(request.flags.out or "views")
    written, errors = write_views(load_classifier(request), files, out)
    for path in written:
        print(report.printable(str(path)))
    for error in errors:
        cli.note(error)
    return 1 if errors else 0


class Looker:
    """Takes images through a classifier's network and keeps what it shows; compiled once."""

    def __init__(self, classifier: Classifier) -> None:
        self._classifier = classifier
        mean, std = tuple(classifier.config.data.mean), tuple(classifier.config.data.std)

        def views(params: dict, stats: dict, image_HWC: jax.Array) -> dict[str, list[jax.Array]]:
            x_BHWC = augment.normalise(image_HWC[None], mean, std)
            return classifier.model.views(params, stats, x_BHWC)

        self._views = jax.jit(views)

    def __call__(self, image_HWC: np.ndarray) -> Look:
        """Runs the network on one uint8 image of its size and keeps what it shows.

        Raises ValueError for a network that has nothing to show.
        """
        c = self._classifier
        seen = jax.device_get(self._views(c.params, c.stats, image_HWC))
        if not set(seen) - {"logits"}:
            model = c.config.model
            mixer = f" with mixer={model.mixer!r}" if "mixer" in model else ""
            raise ValueError(
                f"{model.variant} ({model.family}){mixer} has nothing to show: neither attention "
                "weights nor groups nor tokens at known places. Visualize a network with softmax "
                "attention, an hsvit, or a family of vix, pix, hvt, deit and dhvt"
            )
        return look(c.model, seen, 0)


def look(model: Any, seen: dict[str, list[np.ndarray]], example: int) -> Look:
    """Cuts one example out of a batch's views, from `model.views` as NumPy arrays."""
    groups = {"votes", "group attention"}  # stand before the batch
    one = {
        kind: [x[:, example] if kind in groups else x[example] for x in arrays]
        for kind, arrays in seen.items()
    }
    return Look(
        logits_K=one["logits"][0],
        votes_GK=one["votes"][0] if "votes" in one else None,
        groups=_groups(one) if "maps" in one else None,
        sequences=_sequences(model, one),
    )


def _groups(seen: dict[str, list[np.ndarray]]) -> Groups:
    """Feature maps by group; towers follow each other, each with its own."""
    maps_CHW = np.concatenate([m.transpose(2, 0, 1) for m in seen["maps"]])
    attention = seen.get("group attention")
    if attention is None:  # no attention: one group, nothing is preferred
        shares = np.full((1, len(maps_CHW)), 1 / len(maps_CHW), np.float32)
    else:
        depth = len(attention) // len(seen["maps"])  # blocks of a tower
        last = np.concatenate(attention[depth - 1 :: depth])
        shares = last[:, :, 0, 1:].mean(1)
    return Groups(maps_CHW.reshape(*shares.shape, *maps_CHW.shape[1:]), shares)


def _sequences(model: Any, seen: dict[str, list[np.ndarray]]) -> Sequences | None:
    """Attention and features of at most four blocks, evenly chosen among those that are pictures.

    Head tokens stand behind the patches; what a network calls them is its `head_tokens` setting.
    """
    c = model.config
    extra = c.heads if getattr(c, "head_tokens", False) else 0
    attention = seen.get("attention", [])
    own = [w.shape[-1] - extra for w in attention]
    shown = spread_out([i for i, t in enumerate(own) if model.grid(t) is not None])

    def on_patches(weights_NS: np.ndarray, tokens: int) -> np.ndarray:
        """Attention by key → (N, rows, columns)."""
        placed = model.at_places(weights_NS[None, :, :tokens].swapaxes(1, 2))
        return np.asarray(placed)[0].transpose(2, 0, 1)

    before = model.grid(own[shown[0]])[0] if shown else 0
    looks, matrices, head_tokens = [], [], []
    for i in shown:
        weights_NTS, tokens = attention[i], own[i]
        asked_NS = weights_NTS[:, 0] if before else weights_NTS[:, :tokens].mean(1)
        looks.append(on_patches(asked_NS, tokens))
        matrices.append(weights_NTS.mean(0))
        if extra:
            heads = np.arange(extra)
            head_tokens.append(on_patches(weights_NTS[heads, tokens + heads], tokens))
    placed = {}
    for i, x_TD in enumerate(seen.get("tokens", [])):
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
        looks=looks,
        matrices=matrices,
        head_tokens=head_tokens,
        feature_blocks=[i + 1 for i in features],
        features=[placed[i] for i in features],
    )


def spread_out(items: list[int], most: int = 4) -> list[int]:
    """All of a short list, else `most` of them: its second, its last but one and between."""
    if len(items) <= most:
        return items
    ends = (1, len(items) - 2) if len(items) >= 2 * most else (0, len(items) - 1)
    return [items[round(i)] for i in np.linspace(*ends, most)]


def write_views(
    classifier: Classifier, paths: Sequence[Path], out: Path
) -> tuple[list[Path], list[str]]:
    """Writes the PNGs of every image file into `out`; returns them and the errors of bad images.

    The files are called after the image: NAME-votes.png, -maps, -looks, -matrices, -heads,
    -features, those that the network has. Raises ValueError for a network with nothing to show, or
    when `out` is a file.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out={out} is a file; --mode=visualize writes a folder of PNGs")
    look, written, errors = Looker(classifier), [], []
    names = classifier.class_names
    for path, stem in zip(paths, _stems(paths), strict=True):
        try:
            image_HWC = classifier.read(path)
        except data.BadImage as error:
            errors.append(str(error))
            continue
        seen = look(image_HWC)
        out.mkdir(parents=True, exist_ok=True)
        for kind, figure in visualize_figures.figures(
            seen, image_HWC, names, str(Path(*path.parts[-2:]))
        ):
            written.append(out / f"{stem}-{kind}.png")
            report.save_figure(figure, written[-1])
    return written, errors


def _stems(paths: Sequence[Path]) -> list[str]:
    """A name for each file's pictures, its own where no other has it."""
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
