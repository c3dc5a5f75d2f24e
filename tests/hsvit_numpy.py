"""An HSViT forward in plain NumPy, over a state dict with the reference's keys (float64, NCHW).

Written from the architecture's description and independent of hsvit_jax: it gives the tests
logits for any constructor, and is itself held to the golden vectors.
"""

import math

import numpy as np


def state(constructor: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """A random float32 state dict of the reference's layout, every tensor of some effect."""
    rng = np.random.default_rng(seed)
    c, tensors = constructor, {}

    def linear(key, fan_out, fan_in, *rest):
        bound = math.prod((fan_in, *rest)) ** -0.5
        tensors[f"{key}.weight"] = rng.normal(0, bound, (fan_out, fan_in, *rest))
        tensors[f"{key}.bias"] = rng.normal(0, 0.3, fan_out)

    def norm(key, size):
        tensors[f"{key}.weight"] = rng.normal(1, 0.2, size)
        tensors[f"{key}.bias"] = rng.normal(0, 0.2, size)

    d, groups, nums = c["attn_embed_dim"], c["attn_num"], c["conv_kernel_nums"]
    if c["conv_kernel_sizes"][-1]:
        c_in = c["num_channels"]
        for i, (c_out, kernel) in enumerate(zip(nums, c["conv_kernel_sizes"], strict=True)):
            for j, size in enumerate((kernel, 3)):
                key = f"model.conv2d_layers.{i}.layer.{j}"
                linear(f"{key}.convolution", c_out, c_in, size, size)
                del tensors[f"{key}.convolution.bias"]
                norm(f"{key}.normalization", c_out)
                tensors[f"{key}.normalization.running_mean"] = rng.normal(0, 0.3, c_out)
                tensors[f"{key}.normalization.running_var"] = rng.uniform(0.5, 2, c_out)
                c_in = c_out
        rows, columns = np.broadcast_to(c["image_size"], 2)
        stride = math.prod(c["pool_strides"])
        linear("model.embed_projection.0", d, (rows // stride) * (columns // stride))
    if groups:
        tokens = nums[-1] // groups + 1
        tensors["model.cls_token_embeddings"] = rng.normal(size=(groups, 1, 1, d))
        tensors["model.position_embeddings"] = rng.normal(size=(groups, 1, tokens, d))
    for g in range(groups):
        for i in range(c["attn_depth"]):
            key = f"model.attn_encoders.{g}.{i}.attn_block"
            norm(f"{key}.layer_norm", d)
            linear(f"{key}.self_attn.out_proj", d, d)
            linear(f"{key}.self_attn.in_proj", 3 * d, d)
            for name in ("weight", "bias"):  # PyTorch's own spelling
                tensors[f"{key}.self_attn.in_proj_{name}"] = tensors.pop(
                    f"{key}.self_attn.in_proj.{name}"
                )
    norm("classifier.mlp_head.0", d)
    linear("classifier.mlp_head.1", c["num_classes"], d)
    return {k: v.astype(np.float32) for k, v in tensors.items()}


def forward(tensors: dict[str, np.ndarray], constructor: dict, images: np.ndarray) -> np.ndarray:
    """Evaluation logits (B, K) of images (B, C, H, W), in float64."""
    t = {k: v.astype(np.float64) for k, v in tensors.items() if v.dtype.kind == "f"}
    c, x = constructor, images.astype(np.float64)
    if c["conv_kernel_sizes"][-1]:
        layers = zip(c["conv_kernel_sizes"], c["pool_strides"], strict=True)
        for i, (kernel, stride) in enumerate(layers):
            for j, size in enumerate((kernel, 3)):
                key = f"model.conv2d_layers.{i}.layer.{j}"
                x = np.einsum(
                    "bchwij,ocij->bohw", _windows(x, size, 0.0), t[f"{key}.convolution.weight"]
                )
                scale, bias, mean, var = (
                    t[f"{key}.normalization.{name}"][:, None, None]
                    for name in ("weight", "bias", "running_mean", "running_var")
                )
                x = np.maximum((x - mean) / np.sqrt(var + 1e-5) * scale + bias, 0)
            if stride > 1:
                x = _windows(x, kernel, -np.inf)[:, :, ::stride, ::stride].max((-2, -1))
        z = np.maximum(_linear(t, "model.embed_projection.0", x.reshape(*x.shape[:2], -1)), 0)
    else:
        planes = x.reshape(*x.shape[:2], -1)
        order = [i % x.shape[1] for i in range(c["conv_kernel_nums"][-1])]
        z = planes[:, order]
    groups, heads = c["attn_num"], c["num_heads"]
    pooled = z.mean(1)
    if groups:
        pooled = 0
        for g, part in enumerate(np.split(z, groups, axis=1)):
            cls = np.broadcast_to(t["model.cls_token_embeddings"][g], (len(z), 1, z.shape[-1]))
            y = np.concatenate([cls, part], 1) + t["model.position_embeddings"][g]
            for i in range(c["attn_depth"]):
                y = y + _attention(t, f"model.attn_encoders.{g}.{i}.attn_block", y, heads)
            pooled = pooled + y[:, 0] / groups
    return _linear(t, "classifier.mlp_head.1", _norm(t, "classifier.mlp_head.0", pooled))


def _windows(x: np.ndarray, size: int, outside: float) -> np.ndarray:
    """All size×size neighbourhoods, (B, C, H, W, size, size)."""
    pad = size // 2
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=outside)
    return np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(2, 3))


def _linear(t, key, x):
    return x @ t[f"{key}.weight"].T + t[f"{key}.bias"]


def _norm(t, key, x):
    centred = x - x.mean(-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return centred / spread * t[f"{key}.weight"] + t[f"{key}.bias"]


def _attention(t, key, y, heads):
    packed = _norm(t, f"{key}.layer_norm", y) @ t[f"{key}.self_attn.in_proj_weight"].T
    packed = packed + t[f"{key}.self_attn.in_proj_bias"]
    batch, tokens, d = y.shape
    q, k, v = (
        part.reshape(batch, tokens, heads, d // heads).transpose(0, 2, 1, 3)
        for part in np.split(packed, 3, axis=-1)
    )
    scores = q @ k.swapaxes(2, 3) / np.sqrt(d // heads)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    joined = (weights @ v).transpose(0, 2, 1, 3).reshape(batch, tokens, d)
    return _linear(t, f"{key}.self_attn.out_proj", joined)
