"""Mixers: what depends on whom, what grows with the tokens, and the formulas of their pieces."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs

from hsvit_jax import mesh
from hsvit_jax.models import costs, network
from hsvit_jax.models.vix import mixer_config, mixers

T, D = 13, 10
SMALL = {"heads": 3, "head_dim": 4, "projections": 5, "landmarks": 4, "residual_kernel": 5}
IDS = np.array([31, 7, 2, 19])


class Alone(network.Network):
    """A mixer as a network: an 'image' (1, T, D) is its tokens, and they are the logits."""

    def parts(self, key):
        m = self.config
        return {"mixer": mixers.build(m, m.image_size[1], m.image_channels, key)}

    def forward(self, params, stats, images_BHWC, context):
        bound = self.bind(params, stats)
        return bound["mixer"](images_BHWC[:, 0], context, 0), bound.stats()


def sequences(batch=4):
    return np.random.default_rng(1).normal(size=(batch, 1, T, D)).astype(np.float32)


@pytest.fixture(
    scope="module", params=[*mixer_config.NAMES, "performer coupled", "nystrom coupled"]
)
def mixed(request):
    """(mixing, network, params, stats, compiled mixing of tokens, ids and a key)."""
    name, _, coupled = request.param.partition(" ")
    sizes = {"dropout": 0.3, "batch_coupling": bool(coupled), **SMALL}
    m = mixer_config.Mixing((1, T), D, 1, mixer=name, **sizes)
    model = Alone(m)
    params, stats = small_runs.made_up_values(model)

    @jax.jit
    def run(x, ids, key):
        with jax.numpy_rank_promotion("raise"):
            return model.apply(params, stats, x, dropout_key=key, example_ids_B=ids)[0]

    return m, model, params, stats, run


def test_a_sample_depends_on_itself_alone_unless_coupled(mixed):
    m, _, _, _, run = mixed
    x, key = sequences(), jax.random.key(3)
    whole = run(x, IDS, key)
    other = x.copy()
    other[3] *= 5
    error = np.abs(run(other, IDS, key) - whole)[:3].max()
    assert (error > 1e-4) if m.batch_coupling else (error < 1e-6)


def test_what_is_dropped_follows_the_example_and_the_key(mixed):
    m, _, _, _, run = mixed
    x, key, order = sequences(), jax.random.key(3), np.array([2, 0, 3, 1])
    whole = run(x, IDS, key)
    np.testing.assert_allclose(run(x[order], IDS[order], key), whole[order], atol=1e-5)
    if m.mixer != "fnet":  # which has nothing to drop
        assert np.abs(run(x, IDS, jax.random.key(4)) - whole).max() > 1e-3
        assert np.abs(run(x, IDS + 1, key) - whole).max() > 1e-3


@pytest.mark.cpu
@pytest.mark.parametrize("mixed", ["performer coupled", "nystrom coupled"], indirect=True)
def test_a_batch_split_over_devices_mixes_the_same(mixed):
    _, model, params, stats, run = mixed
    x, key = sequences(), jax.random.key(3)
    spread = mesh.spread(model, mesh.make(1, 2, groups=0))

    def loss(x):
        out, after = spread(params, stats, x, train=True, dropout_key=key, example_ids_B=IDS)
        return (out**2).mean(), (out, after)

    grads, (out, after) = jax.jit(jax.grad(loss, has_aux=True))(x)
    np.testing.assert_allclose(out, run(x, IDS, key), atol=1e-5)
    one = jax.jit(jax.grad(lambda x: (run(x, IDS, key) ** 2).mean()))(x)
    np.testing.assert_allclose(grads, one, atol=1e-5 * np.abs(one).max())
    jax.tree.map(np.testing.assert_array_equal, after, stats)  # features are never drawn again


@pytest.mark.parametrize("name", mixer_config.NAMES)
def test_what_grows_with_the_tokens(name):
    """Four times the tokens: four times the compiled work (FNet: and a logarithm), or sixteen."""

    def work(length):
        sizes = {"heads": 2, "head_dim": 8, "landmarks": 16, "projections": 16}
        model = Alone(mixer_config.Mixing((1, length), 16, 1, mixer=name, **sizes))
        shapes = model.init_shapes()
        x = jax.ShapeDtypeStruct((1, 1, length, 16), jnp.float32)
        compiled = jax.jit(lambda p, x: model.apply(*p, x)[0]).lower(shapes, x).compile()
        macs = costs.flops(model)
        return compiled.cost_analysis()["flops"], macs

    (small, counted), (large, counted_large) = work(512), work(2048)
    quadratic = name in ("softmax", "mlp_mixer")
    if counted:
        growth = counted_large / counted
        assert growth > 12 if quadratic else growth < 4.1
        assert 1 < large / counted_large < 1.5  # and the sums and exponentials
    assert large / small > 12 if quadratic else large / small < 5


@pytest.mark.parametrize("mixed", ["performer", "nystrom", "fnet"], indirect=True)
def test_bfloat16_computes_narrow(mixed):
    m, model, params, stats, _ = mixed
    x = sequences()
    narrow = Alone(m, dtype=jnp.bfloat16)
    exact = jax.jit(lambda x: model.apply(params, stats, x)[0])(x)
    ours = jax.jit(lambda x: narrow.apply(params, stats, x)[0])(x)
    error = np.abs(ours - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < 0.06


# --- Pieces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "taps"), [(7, 33), (70, 33), (64, 5), (5, 1)])
def test_a_filter_along_the_sequence(length, taps):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 3, length, 2)), rng.normal(size=(3, taps))
    ours = mixers.along_sequence(jnp.float32(x), jnp.float32(kernel))
    wide = np.pad(x, ((0, 0), (0, 0), (taps // 2, taps // 2), (0, 0)))
    theirs = sum(kernel[:, i, None, None] * wide[:, :, i : i + length] for i in range(taps))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_orthogonal_features_are_orthogonal_in_blocks():
    draw = jax.jit(mixers.orthogonal_features, static_argnums=(1, 2))
    rows = np.asarray(draw(jax.random.key(0), 11, 4))
    assert rows.shape == (11, 4)
    for block in (rows[:4], rows[4:8], rows[8:]):
        gram = block @ block.T
        assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-4
    keys = jax.random.split(jax.random.key(1), 100)
    many = jax.lax.map(lambda key: mixers.orthogonal_features(key, 8, 8), keys).reshape(800, 8)
    squares = np.square(many).sum(1)  # chi-squared with eight degrees of freedom
    assert abs(squares.mean() - 8) < 4 * math.sqrt(16 / 800)
    assert abs(squares.var() - 16) < 6
