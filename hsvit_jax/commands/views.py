"""Records of the arrays that `hsvit visualize` draws for one image.

G groups, N heads, T tokens, K classes, D channels.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Groups:
    """Feature maps and attention of an HSViT's groups for one image.

    Attributes:
      maps_GCHW: (G, C/G, H, W), the trunk's feature maps that are each group's tokens.
      shares_GC: (G, C/G), attention of the last CLS to each of them, mean over heads; what is
        missing to 1 is attention to itself.
    """

    maps_GCHW: np.ndarray
    shares_GC: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Attention and features of a vision transformer's tokens, in some blocks, for one image.

    Lists have an element per block.

    Attributes:
      blocks: numbers of the blocks whose attention is here, from 1.
      queries: the queries of `attention`, 'CLS' or 'mean of all tokens'.
      before: tokens before the patches.
      attention: (N, rows, columns), attention of the queries to the patches, by head.
      matrices: (T, T), attention by query and key, mean over heads.
      head_tokens: (N, rows, columns), attention of the token of head n in head n; empty where the
        network has no such tokens.
      feature_blocks: numbers of the blocks whose features are here, from 1.
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
    """All arrays of one image: logits (K,), votes (G, K) and the rest where the network has it."""

    logits_K: np.ndarray
    votes_GK: np.ndarray | None = None
    groups: Groups | None = None
    sequences: Sequences | None = None
