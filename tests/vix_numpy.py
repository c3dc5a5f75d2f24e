"""ViX, LeViX, CCX, CvX and PiX in NumPy, float64, from the reference's state dicts.

Written from the papers' formulas and the tensors' names, image first as PyTorch has it (NCHW).
"""

import re

import numpy as np
from hvt_numpy import gelu


def random_state(shapes, seed=0):
    """A state dict of moderate size, in which every tensor matters."""
    rng = np.random.default_rng(seed)
    out = {}
    for key, shape in shapes.items():
        if "running_var" in key:
            t = rng.uniform(0.5, 1.5, shape)
        elif len(shape) > 1 and not key.endswith((".g", ".b", "token", "embedding", "_emb")):
            t = rng.normal(0, np.prod(shape[1:]) ** -0.5, shape)
        else:
            t = rng.normal(1.0 if key.endswith((".weight", ".g")) else 0.0, 0.2, shape)
        out[key] = t.astype(np.float32)
    return out


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def conv(x, w, b=None, stride=1):
    """Padding of half a window; as many groups as the weight's second axis says."""
    k, per_group = w.shape[2], w.shape[1]
    x = np.pad(x, ((0, 0), (0, 0), (k // 2,) * 2, (k // 2,) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), (2, 3))
    windows = windows[:, :, ::stride, ::stride]
    groups = x.shape[1] // per_group
    parts = zip(np.split(windows, groups, 1), np.split(w, groups), strict=True)
    y = np.concatenate([np.einsum("bchwij,ocij->bohw", p, v) for p, v in parts], 1)
    return y if b is None else y + b[:, None, None]


class Network:
    """The tensors t (float64) and what they do not tell: c has heads, landmarks, strides, …"""

    def __init__(self, tensors, **c):
        self.t = {k: np.asarray(v, np.float64) for k, v in tensors.items()}
        self.c = c

    def has(self, key):
        return key in self.t

    def number(self, pattern):
        """How many different numbers stand in the parentheses."""
        return len({m[1] for m in (re.match(pattern, k) for k in self.t) if m})

    def linear(self, key, x):
        w = self.t[f"{key}.weight"]
        y = x @ w.reshape(w.shape[0], -1).T
        return y + self.t[f"{key}.bias"] if self.has(f"{key}.bias") else y

    def conv(self, key, x, stride=1):
        return conv(x, self.t[f"{key}.weight"], self.t.get(f"{key}.bias"), stride)

    def layer_norm(self, key, x):
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return y * self.t[f"{key}.weight"] + self.t[f"{key}.bias"]

    def channel_norm(self, key, x):
        y = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
        return y * self.t[f"{key}.g"].ravel() + self.t[f"{key}.b"].ravel()

    def batch_norm(self, key, x):
        """Of evaluation, over the last axis."""
        y = (x - self.t[f"{key}.running_mean"]) / np.sqrt(self.t[f"{key}.running_var"] + 1e-5)
        return y * self.t[f"{key}.weight"] + self.t[f"{key}.bias"]

    def feed_forward(self, key, x, up="net.0", down="net.3"):
        return self.linear(key + down, gelu(self.linear(key + up, x)))

    # --- Mixers ------------------------------------------------------------------------------

    def heads(self, x, heads=None):
        b, n, width = x.shape
        heads = heads or self.c["heads"]
        return x.reshape(b, n, heads, width // heads).transpose(0, 2, 1, 3)

    def rotate(self, x):
        """As complex numbers: the pair (2j, 2j + 1) of token n by n·10000^(−2j/width)."""
        if not self.c.get("rope"):
            return x
        n, width = x.shape[2:]
        angle = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
        z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack([z.real, z.imag], -1).reshape(x.shape)

    def mix(self, key, x, fnet=False):
        if fnet:
            return np.fft.fft2(x, axes=(1, 2)).real
        if self.has(f"{key}fast_attention.projection_matrix"):
            o, last = self.performer(key, x), "to_out"
        elif self.has(f"{key}proj_k"):
            o, last = self.linformer(key, x), "to_out"
        elif self.has(f"{key}res_conv.weight"):
            o, last = self.nystrom(key, x), "to_out.0"
        else:
            name, last = ("qkv", "proj") if self.has(f"{key}qkv.weight") else ("to_qkv", "to_out.0")
            q, k, v = map(self.heads, np.split(self.linear(key + name, x), 3, -1))
            o = self.attend(self.rotate(q), self.rotate(k), v)
        n = x.shape[1]
        return self.linear(key + last, o.transpose(0, 2, 1, 3).reshape(len(x), o.shape[2], -1))[
            :, -n:
        ]

    def attend(self, q, k, v):
        return softmax(q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5) @ v

    def performer(self, key, x):
        p = self.t[f"{key}fast_attention.projection_matrix"]
        q, k, v = (self.heads(self.linear(f"{key}to_{n}", x)) for n in "qkv")
        q, k = self.rotate(q), self.rotate(k)
        d = q.shape[-1]

        def features(y, whole):
            u = d**-0.25 * y @ p.T
            top = u.max() if whole else u.max(-1, keepdims=True)
            norm = (y**2).sum(-1, keepdims=True) / 2 * d**-0.5
            return len(p) ** -0.5 * (np.exp(u - norm - top) + 1e-4)

        q, k = features(q, False), features(k, True)
        a = q @ k.swapaxes(2, 3)
        return a @ v / a.sum(-1, keepdims=True)

    def linformer(self, key, x):
        q = self.heads(self.linear(f"{key}to_q", x))
        k = self.linear(f"{key}to_k", x)
        one = k.shape[-1] == q.shape[-1]
        k = self.heads(k, 1 if one else None)
        p = self.t[f"{key}proj_k"]
        project = lambda y: np.einsum("bhnd,nk->bhkd", y, p)  # noqa: E731
        return self.attend(self.rotate(q), project(self.rotate(k)), project(k))

    def nystrom(self, key, x):
        m = self.c["landmarks"]
        x = np.pad(x, ((0, 0), (-x.shape[1] % m, 0), (0, 0)))
        b, n, _ = x.shape
        q, k, v = map(self.heads, np.split(self.linear(f"{key}to_qkv", x), 3, -1))
        q, k = self.rotate(q) * q.shape[-1] ** -0.5, self.rotate(k)
        ql, kl = (y.reshape(b, y.shape[1], m, n // m, -1).mean(3) for y in (q, k))
        a1, a2, a3 = (softmax(s @ t.swapaxes(2, 3)) for s, t in ((q, kl), (ql, kl), (ql, k)))
        z = a2.swapaxes(2, 3) / (np.abs(a2).sum(2).max() * np.abs(a2).sum(3).max())
        eye = np.eye(m)
        for _ in range(6):
            y = a2 @ z
            z = z @ (13 * eye - y @ (15 * eye - y @ (7 * eye - y))) / 4
        w = self.t[f"{key}res_conv.weight"][:, 0, :, 0]
        half = w.shape[1] // 2
        padded = np.pad(v, ((0, 0), (0, 0), (half, half), (0, 0)))
        local = sum(w[:, i, None, None] * padded[:, :, i : i + n] for i in range(w.shape[1]))
        return a1 @ z @ (a3 @ v) + local

    # --- Families ----------------------------------------------------------------------------

    def stem(self, key, x):
        for i, stride in enumerate(self.c["strides"]):
            x = self.conv(f"{key}{i}", x, stride)
        return x

    def patches(self, x, by_channel=False):
        b, c, h, w = x.shape
        p = self.c["patch"]
        x = x.reshape(b, c, h // p, p, w // p, p)
        x = x.transpose((0, 2, 4, 1, 3, 5) if by_channel else (0, 2, 4, 3, 5, 1))
        return x.reshape(b, -1, p * p * c)

    def embed(self, x, key, number):
        if self.c.get("strides"):
            return tokens(self.stem(key, x))
        return self.linear(f"{key}{number}", self.patches(x, by_channel=number == 2))

    def blocks(self, key, x):
        for i in range(self.number(re.escape(key) + r"(\d+)\.")):
            k = f"{key}{i}."
            y = self.layer_norm(f"{k}0.norm", x)
            x = x + self.mix(f"{k}0.fn.", y, fnet=self.c.get("fnet"))
            x = x + self.feed_forward(f"{k}1.fn.", self.layer_norm(f"{k}1.norm", x))
        return x

    def cls(self, x):
        cls = np.broadcast_to(self.t["cls_token"], (len(x), 1, x.shape[2]))
        x = np.concatenate([cls, x], 1)
        return x if self.c.get("rope") else x + self.t["pos_embedding"]

    def vix(self, x):
        x = self.cls(self.embed(x, "to_patch_embedding.", 1))
        x = self.blocks("transformer.layers.", x)
        return self.linear("mlp_head.1", self.layer_norm("mlp_head.0", x[:, 0]))

    def mlp_mixer(self, x):
        x = self.embed(x, "", 1)
        i = len(self.c.get("strides") or (1,)) + 1
        while self.has(f"{i}.0.fn.0.weight"):
            y = self.layer_norm(f"{i}.0.norm", x).swapaxes(1, 2)
            x = x + self.feed_forward(f"{i}.0.fn.", y, "0", "3").swapaxes(1, 2)
            x = x + self.feed_forward(f"{i}.1.fn.", self.layer_norm(f"{i}.1.norm", x), "0", "3")
            i += 1
        return self.linear(f"{i + 2}", self.layer_norm(f"{i}", x).mean(1))

    def pix(self, x):
        size = np.array(x.shape[2:]) // self.c.get("patch", 1)
        for stride in self.c.get("strides") or ():
            size = -(-size // stride)
        x = self.cls(self.embed(x, "to_patch_embedding.", 2))
        for i in range(self.number(r"layers\.(\d+)\.")):
            if i % 2 == 0:
                x = self.blocks(f"layers.{i}.layers.", x)
                continue
            y = x[:, 1:].swapaxes(1, 2).reshape(len(x), -1, *size)
            y = self.conv(f"layers.{i}.downsample.net.0", y, 2)
            size = y.shape[2:]
            y = self.conv(f"layers.{i}.downsample.net.1", y)
            x = np.concatenate([self.linear(f"layers.{i}.cls_ff", x[:, :1]), tokens(y)], 1)
        return self.linear("mlp_head.1", self.layer_norm("mlp_head.0", x[:, 0]))

    def levix(self, x):
        x = tokens(self.stem("conv_embedding.", x))
        for i in range(self.number(r"backbone\.0\.layers\.(\d+)\.")):
            k = f"backbone.0.layers.{i}."
            if self.has(f"{k}0.to_q.0.weight"):
                q, kk, v = (
                    self.heads(self.batch_norm(f"{k}0.to_{n}.1", self.linear(f"{k}0.to_{n}.0", x)))
                    for n in "qkv"
                )
                o = self.attend(q, kk, v).transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
                y = self.batch_norm(f"{k}0.to_out.2", self.linear(f"{k}0.to_out.1", gelu(o)))
            else:
                y = self.mix(f"{k}0.", x)
            x = x + y
            x = x + self.feed_forward(f"{k}1.", x)
        return self.linear("mlp_head", x.mean(1))

    def ccx(self, x):
        for i, stride in enumerate(self.c["strides"]):
            x = np.maximum(self.conv(f"tokenizer.conv_layers.{i}.0", x, stride), 0)
            k = self.c.get("pool", 3)
            padded = np.pad(
                x, ((0, 0), (0, 0), (k // 2,) * 2, (k // 2,) * 2), constant_values=-np.inf
            )
            windows = np.lib.stride_tricks.sliding_window_view(padded, (k, k), (2, 3))
            step = self.c.get("pool_stride", 1)
            x = windows[:, :, ::step, ::step].max((4, 5))
        x = tokens(x) + self.t["classifier.positional_emb"]
        for i in range(self.number(r"classifier\.blocks\.(\d+)\.")):
            k = f"classifier.blocks.{i}."
            x = x + self.mix(f"{k}self_attn.", self.layer_norm(f"{k}pre_norm", x))
            x = self.layer_norm(f"{k}norm1", x)
            x = x + self.feed_forward(k, x, "linear1", "linear2")
        x = self.layer_norm("classifier.norm", x)
        weights = softmax(self.linear("classifier.attention_pool", x), 1)
        return self.linear("classifier.fc", (weights * x).sum(1))

    def cvx(self, x):
        stages = self.number(r"layers\.(\d+)\.0\.")
        for s, stride in zip(range(stages), self.c["strides"], strict=True):
            x = self.conv(f"layers.{s}.0", x, stride)
            size = x.shape[2:]
            y = self.channel_norm(f"layers.{s}.1", tokens(x))
            for i in range(self.number(rf"layers\.{s}\.2\.layers\.(\d+)\.")):
                k = f"layers.{s}.2.layers.{i}."
                z = self.channel_norm(f"{k}0.norm", y)
                y = y + (
                    self.cvt(f"{k}0.fn.", z, size)
                    if self.has(f"{k}0.fn.to_kv.net.2.weight")
                    else self.mix(f"{k}0.fn.", z)
                )
                y = y + self.feed_forward(f"{k}1.fn.", self.channel_norm(f"{k}1.norm", y))
            x = y.swapaxes(1, 2).reshape(len(x), -1, *size)
        return self.linear(f"layers.{stages + 2}", x.mean((2, 3)))

    def cvt(self, key, x, size):
        """Attention whose projections begin with a depthwise convolution."""
        grid = x.swapaxes(1, 2).reshape(len(x), -1, *size)

        def project(name):
            y = tokens(self.conv(f"{key}{name}.net.0", grid))
            return self.linear(f"{key}{name}.net.2", self.batch_norm(f"{key}{name}.net.1", y))

        parts = (project("to_q"), *np.split(project("to_kv"), 2, -1))
        o = self.attend(*map(self.heads, parts)).transpose(0, 2, 1, 3)
        return self.linear(f"{key}to_out.0", o.reshape(*x.shape[:2], -1))


def tokens(x):
    return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)
