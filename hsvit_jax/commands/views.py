"""Records of the arrays that a network shows of one image.

G groups, N heads, T tokens, K classes, D channels.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Groups:
    """Feature maps and attention of an HSViT's groups for one image.

    maps: (G, C/G, H, W), the trunk's feature maps that are each group's tokens. shares: (G, C/G),
    the attention that the last CLS pays to each of them, mean over heads; the rest is CLS's own.
    """

    maps_GCHW: np.ndarray
    shares_GC: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Attention and features of a vision transformer's tokens, in some blocks, for one image.

    blocks: their numbers, from 1. queries: of whom `looks` tells, 'CLS' or 'mean of all tokens'.
    Each list has an element per block: looks (N, rows, columns), attention to patches by head;
    matrices (T, T), the mean over heads; head_tokens (N, rows, columns), of the token of head n in
    head n (empty where there are none); features (rows, columns, D), what the tokens hold.
    """

    blocks: list[int]
    queries: str
    before: int
    looks: list[np.ndarray]
    matrices: list[np.ndarray]
    head_tokens: list[np.ndarray]
    feature_blocks: list[int]
    features: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Look:
    """All there is to show of one image: logits (K,), votes (G, K) and the rest where it exists."""

    logits_K: np.ndarray
    votes_GK: np.ndarray | None = None
    groups: Groups | None = None
    sequences: Sequences | None = None
