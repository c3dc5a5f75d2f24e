"""HVT, DeiT and DHVT in NumPy, float64, by the reference's own names and layout (NCHW).

Written from the papers' equations and the description of the authors' code; loops rather than
tricks, so that it shares nothing with the networks it checks.
"""

import math

import jax
import numpy as np

erf = np.vectorize(math.erf)


def gelu(x):
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def random_state(shapes, seed=0):
    """Tensors of these shapes, such that every one of them matters and signals survive."""
    rng = np.random.default_rng(seed)
    out = {}
    for key, shape in shapes.items():
        x = rng.normal(size=shape)
        if key.endswith("running_var"):
            x = rng.uniform(0.5, 1.5, shape)
        elif key.endswith(("alpha", "weight")) and x.ndim in (1, 4) and x.size == max(shape):
            x = 1 + 0.2 * x
        elif key.endswith("weight"):
            x = x / math.sqrt(x[0].size)
        else:
            x = 0.3 * x
        out[key] = x.astype(np.float32)
    return out


def random_tree(shapes, seed=0):
    """Values for a tree of shapes of ours: instant, where compiling `init` takes seconds."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name, values = path[-1].key, rng.normal(size=x.shape)
        if name in ("scale", "var"):
            values = 1 + 0.3 * np.abs(values)
        elif name == "kernel":
            values /= math.sqrt(math.prod(x.shape[:-1]))
        else:
            values *= 0.3
        return jax.numpy.asarray(values, np.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


# --- Layers, given all tensors and the key of one ------------------------------------------------


def linear(t, key, x):
    y = x @ t[f"{key}.weight"].T.astype(np.float64)
    return y + t[f"{key}.bias"] if f"{key}.bias" in t else y


def layer_norm(t, key, x, eps):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return x * t[f"{key}.weight"] + t[f"{key}.bias"]


def batch_norm(t, key, x):
    def over(v):
        return t[f"{key}.{v}"].astype(np.float64)[:, None, None]

    x = (x - over("running_mean")) / np.sqrt(over("running_var") + 1e-5)
    return x * over("weight") + over("bias")


def conv(t, key, x, stride, pad, groups=1):
    weight = t[f"{key}.weight"].astype(np.float64)
    c_out, per_group, k, _ = weight.shape
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    rows, columns = ((n - k) // stride + 1 for n in x.shape[2:])
    y = np.zeros((len(x), c_out, rows, columns))
    for o in range(c_out):
        first = o // (c_out // groups) * per_group
        for i in range(rows):
            for j in range(columns):
                part = x[:, first : first + per_group, i * stride :, j * stride :][:, :, :k, :k]
                y[:, o, i, j] = (part * weight[o]).sum((1, 2, 3))
    return y + t[f"{key}.bias"][:, None, None] if f"{key}.bias" in t else y


def attention(t, key, x, heads):
    """(output before dropping head tokens, attention weights (B, N, T, T))"""
    batch, tokens, dim = x.shape
    qkv = linear(t, f"{key}.qkv", x).reshape(batch, tokens, 3, heads, dim // heads)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    weights = softmax(q @ k.transpose(0, 1, 3, 2) / math.sqrt(dim // heads))
    y = (weights @ v).transpose(0, 2, 1, 3).reshape(batch, tokens, dim)
    return linear(t, f"{key}.proj", y), weights


def flat(x):
    """(B, C, H, W) → (B, H·W, C)"""
    return x.reshape(*x.shape[:2], -1).transpose(0, 2, 1)


# --- HVT and DeiT --------------------------------------------------------------------------------


def hvt_shapes(c):
    """Shapes of the state dict; c: the reference's constructor, with pool, pool_dims, cls, size."""
    d = c["num_heads"] * c["head_dim"]
    channels, p, hidden = c.get("in_chans", 3), c["patch_size"], int(d * c["mlp_ratio"])
    rows, columns = (n // p for n in c["size"])
    cls, width, window = c.get("cls", False), c["pool_block_width"], c["pool_kernel_size"]
    out = {"cls_token": (1, 1, d)} if cls else {}
    out |= {"pos_embed": (1, rows * columns + cls, d)}
    out |= {"patch_embed.proj.weight": (d, channels, p, p), "patch_embed.proj.bias": (d,)}
    now = (rows, columns) if c.get("pool_dims", 1) == 2 else (rows * columns,)
    for i in range(c["num_blocks"]):
        key = f"blocks.{i}"
        if width and i % width == 0:
            pad = window // 2 if len(now) == 2 else 0
            now = tuple((n + 2 * pad - window) // 2 + 1 for n in now)
            out[f"{key}.pos_embed"] = (1, math.prod(now), d)
            if c.get("pool") == "conv":
                out[f"{key}.downsample.weight"] = (d, d) + (window,) * len(now)
                out[f"{key}.downsample.bias"] = (d,)
        out |= block_shapes(key, d, c["qkv_bias"])
        for name, shape in (("fc1", (hidden, d)), ("fc2", (d, hidden))):
            out[f"{key}.mlp.{name}.weight"], out[f"{key}.mlp.{name}.bias"] = shape, shape[:1]
    return out | head_shapes(d, c["num_classes"])


def block_shapes(key, d, qkv_bias=True):
    out = {f"{key}.norm{i}.{name}": (d,) for i in (1, 2) for name in ("weight", "bias")}
    out |= {f"{key}.attn.qkv.weight": (3 * d, d), f"{key}.attn.proj.weight": (d, d)}
    return out | {
        f"{key}.attn.{n}.bias": (s,) for n, s in (("qkv", 3 * d), ("proj", d))[not qkv_bias :]
    }


def head_shapes(d, classes):
    return {
        "norm.weight": (d,),
        "norm.bias": (d,),
        "head.weight": (classes, d),
        "head.bias": (classes,),
    }


def pool(t, key, x, c, size):
    """Tokens (B, T, D), as a grid of `size` or in a row, pooled by the window at stride 2."""
    kind, window = c.get("pool", "max"), c["pool_kernel_size"]
    pad = window // 2 if len(size) == 2 else 0
    maps = x.transpose(0, 2, 1).reshape(len(x), x.shape[-1], *size)
    maps = maps if len(size) == 2 else maps[:, :, None]  # one row
    outside = -np.inf if kind == "max" else 0.0
    maps = np.pad(maps, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=outside)
    high = window if len(size) == 2 else 1
    rows, columns = (maps.shape[2] - high) // 2 + 1, (maps.shape[3] - window) // 2 + 1
    out = np.zeros((*maps.shape[:2], rows, columns))
    for i in range(rows):
        for j in range(columns):
            part = maps[:, :, 2 * i : 2 * i + high, 2 * j : 2 * j + window]
            if kind == "conv":
                weight = t[f"{key}.downsample.weight"].reshape(*maps.shape[1:2] * 2, high, window)
                value = np.einsum("bchw,ochw->bo", part, weight) + t[f"{key}.downsample.bias"]
            else:
                value = part.max((2, 3)) if kind == "max" else part.mean((2, 3))
            out[:, :, i, j] = value
    return flat(out), ((rows, columns) if len(size) == 2 else (columns,))


def hvt(t, c, images):
    """Logits; with c['retained'] by PoWER's elimination after each block's attention."""
    heads, eps, cls = c["num_heads"], c["ln_eps"], c.get("cls", False)
    x = conv(t, "patch_embed.proj", images.astype(np.float64), c["patch_size"], 0)
    size = x.shape[2:] if c.get("pool_dims", 1) == 2 else (x.shape[2] * x.shape[3],)
    x = flat(x)
    if cls:
        x = np.concatenate([np.repeat(t["cls_token"], len(x), 0), x], 1)
    x = x + t["pos_embed"]
    for i in range(c["num_blocks"]):
        key = f"blocks.{i}"
        y, weights = attention(t, f"{key}.attn", layer_norm(t, f"{key}.norm1", x, eps), heads)
        x = x + y
        if c.get("retained"):
            received = weights.sum((1, 2))
            if cls:
                received[:, 0] = np.inf
            order = [sorted(np.argsort(-r)[: c["retained"][i]]) for r in received]
            x = np.stack([a[o] for a, o in zip(x, order, strict=True)])
        y = gelu(linear(t, f"{key}.mlp.fc1", layer_norm(t, f"{key}.norm2", x, eps)))
        x = x + linear(t, f"{key}.mlp.fc2", y)
        if c["pool_block_width"] and i % c["pool_block_width"] == 0:
            x, size = pool(t, key, x, c, size)
            x = x + t[f"{key}.pos_embed"]
    x = layer_norm(t, "norm", x, eps)
    return linear(t, "head", x[:, 0] if cls else x.mean(1))


# --- DHVT ----------------------------------------------------------------------------------------


def dhvt_shapes(c):
    """Shapes of the state dict; c: the reference's constructor, with affine, head_tokens."""
    d, h, hidden = c["embed_dim"], c["num_heads"], int(c["embed_dim"] * c["mlp_ratio"])
    channels, out = c.get("in_chans", 3), {"cls_token": (1, 1, d)}
    steps, c_in = int(math.log2(c["patch_size"])), channels
    for i in range(steps):
        c_out, key = d // 2 ** (steps - 1 - i), f"patch_embed.proj.{2 * i}"
        out |= {f"{key}.0.weight": (c_out, c_in, 3, 3), **norm_shapes(f"{key}.1", c_out)}
        c_in = c_out
    if c.get("affine", True):
        for name, n in (("pre", channels), ("post", d)):
            for half in ("alpha", "beta"):
                out[f"patch_embed.{name}_affine.{half}"] = (1, n, 1, 1)
    for i in range(c["depth"]):
        key = f"blocks.{i}"
        out |= block_shapes(key, d)
        if c.get("head_tokens", True):
            out |= {f"{key}.attn.pos_embed": (1, h, d), f"{key}.attn.ht_proj.bias": (d,)}
            out |= {f"{key}.attn.ht_proj.weight": (d, d // h)}
            out |= {f"{key}.attn.ht_norm.{n}": (d // h,) for n in ("weight", "bias")}
        sizes = {"conv1": (hidden, d, 1, 1), "conv2": (hidden, 1, 3, 3), "conv3": (d, hidden, 1, 1)}
        sizes |= {"compress": (d // 4, d), "excitation": (d, d // 4)}
        for name, shape in sizes.items():
            out[f"{key}.mlp.{name}.weight"], out[f"{key}.mlp.{name}.bias"] = shape, shape[:1]
        for number, n in ((1, hidden), (2, hidden), (3, d)):
            out |= norm_shapes(f"{key}.mlp.bn{number}", n)
    return out | head_shapes(d, c["num_classes"])


def norm_shapes(key, n):
    return {f"{key}.{v}": (n,) for v in ("weight", "bias", "running_mean", "running_var")}


def dhvt(t, c, images):
    """Logits."""
    heads, x = c["num_heads"], images.astype(np.float64)

    def affine(name, x):
        if not c.get("affine", True):
            return x
        return x * t[f"patch_embed.{name}_affine.alpha"] + t[f"patch_embed.{name}_affine.beta"]

    x, steps = affine("pre", x), int(math.log2(c["patch_size"]))
    for i in range(steps):
        key = f"patch_embed.proj.{2 * i}"
        x = batch_norm(t, f"{key}.1", conv(t, f"{key}.0", x, 2, 1))
        x = gelu(x) if i < steps - 1 or steps == 1 else x
    x = affine("post", x)
    rows, columns = x.shape[2:]
    x = np.concatenate([np.repeat(t["cls_token"], len(x), 0), flat(x)], 1)
    for i in range(c["depth"]):
        key = f"blocks.{i}"
        y, n = layer_norm(t, f"{key}.norm1", x, 1e-6), x.shape[1]
        if c.get("head_tokens", True):
            y = np.concatenate([y, head_tokens(t, f"{key}.attn", y, heads)], 1)
        y, _ = attention(t, f"{key}.attn", y, heads)
        y[:, 0] += y[:, n:].mean(1) if y.shape[1] > n else 0
        x = x + y[:, :n]
        x = x + daff(t, f"{key}.mlp", layer_norm(t, f"{key}.norm2", x, 1e-6), (rows, columns))
    return linear(t, "head", layer_norm(t, "norm", x, 1e-6)[:, 0])


def head_tokens(t, key, y, heads):
    batch, _, dim = y.shape
    means = y.mean(1).reshape(batch, heads, dim // heads)
    parts = linear(t, f"{key}.ht_proj", means).reshape(batch, heads, heads, dim // heads)
    tokens = gelu(layer_norm(t, f"{key}.ht_norm", parts, 1e-5)).reshape(batch, heads, dim)
    return tokens + t[f"{key}.pos_embed"]


def daff(t, key, y, grid):
    batch, _, dim = y.shape
    maps = y[:, 1:].transpose(0, 2, 1).reshape(batch, dim, *grid)
    hidden = t[f"{key}.conv2.weight"].shape[0]
    maps = gelu(batch_norm(t, f"{key}.bn1", conv(t, f"{key}.conv1", maps, 1, 0)))
    maps = maps + gelu(batch_norm(t, f"{key}.bn2", conv(t, f"{key}.conv2", maps, 1, 1, hidden)))
    maps = batch_norm(t, f"{key}.bn3", conv(t, f"{key}.conv3", maps, 1, 0))
    gate = gelu(linear(t, f"{key}.compress", maps.mean((2, 3))))
    cls = y[:, :1] * linear(t, f"{key}.excitation", gate)[:, None]
    return np.concatenate([cls, flat(maps)], 1)
