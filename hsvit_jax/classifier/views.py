"""Views of a network at work on an image, as arrays: attention, feature maps and votes.

They are activations of the forward pass (`Network.views`), reduced to the literature's views.
G groups, N heads, T tokens, K classes, D channels.

Source: DHVT supplement, figures 3 to 5 and 7 (attention); HVT paper, figure 3 (feature maps);
HSViT paper, section 3.1 (one token per kernel, averaged votes).
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Groups:
    """Feature maps and attention of an HSViT's groups for one image.

    Attributes:
      maps_GCHW: (G, C/G, H, W), the trunk's feature maps, which are the groups' tokens.
      shares_GC: (G, C/G), attention of the last CLS to each token, mean over heads. The rest to 1
        is attention to itself.
    """

    maps_GCHW: np.ndarray
    shares_GC: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Attention and features of a vision transformer's tokens for one image, lists by block.

    Attributes:
      blocks: numbers, from 1, of the blocks with attention.
      queries: the queries of `attention`, 'CLS' or 'mean of all tokens'.
      before: number of tokens before the patches.
      attention: (N, rows, columns), attention of the queries to the patches, by head.
      matrices: (T, T), attention by query and key, mean over heads.
      head_tokens: (N, rows, columns), attention of head n's token in head n; may be empty.
      feature_blocks: numbers, from 1, of the blocks with features.
      features: (rows, columns, D), the tokens after the block.
    """

    blocks: list[int]
    queries: str
    before: int
    attention: list[np.ndarray]
    matrices: list[np.ndarray]
    head_tokens: list[np.ndarray]
    feature_blocks: list[int]
    features: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Views:
    """The arrays of one image; votes of groups that were lost in training are NaN.

    cam_HW: Grad-CAM of the predicted class, see `grad_cam`.
    """

    logits_K: np.ndarray
    votes_GK: np.ndarray | None = None
    groups: Groups | None = None
    sequences: Sequences | None = None
    cam_HW: np.ndarray | None = None


def views_of(
    model: Any,
    arrays: dict[str, list[np.ndarray]],
    example: int = 0,
    voters_G: np.ndarray | None = None,
) -> Views:
    """Selects one example of a batch's views (`model.views` as NumPy arrays).

    Args:
      voters_G: 0 for groups that were lost in training.
    """
    groups = {"votes", "group attention"}  # their first axis is groups, the second the batch
    one = {
        kind: [x[:, example] if kind in groups else x[example] for x in of_kind]
        for kind, of_kind in arrays.items()
    }
    votes_GK = one["votes"][0] if "votes" in one else None
    if votes_GK is not None and voters_G is not None:
        votes_GK = np.where(voters_G[:, None] > 0, votes_GK, np.nan)
    maps = _groups(one) if "maps" in one else None
    return Views(one["logits"][0], votes_GK, maps, _sequences(model, one))


def _groups(arrays: dict[str, list[np.ndarray]]) -> Groups:
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
    """Attention and features of a few blocks, evenly chosen among those with a token grid."""
    c = model.config
    extra = c.heads if getattr(c, "head_tokens", False) else 0  # tokens after the patches
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
        queries = weights_NTS.shape[1] - extra  # more than keys in a CvT, which strides over keys
        query_NS = weights_NTS[:, 0] if before else weights_NTS[:, :queries].mean(1)
        by_head.append(on_patches(query_NS, tokens))
        matrices.append(weights_NTS.mean(0))
        if extra:
            heads = np.arange(extra)
            head_tokens.append(on_patches(weights_NTS[heads, tokens + heads], tokens))
    placed = {}
    for i, x_TD in enumerate(arrays.get("tokens", [])):
        if (features := model.at_places(x_TD[None])) is not None:
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
    """Chooses at most `most` items, evenly spaced; a long list drops its two ends."""
    if len(items) <= most:
        return items
    ends = (1, len(items) - 2) if len(items) >= 2 * most else (0, len(items) - 1)
    return [items[round(i)] for i in np.linspace(*ends, most)]
