"""Compressed sums over the mesh: bytes of the compiled program, errors, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import hlo

from hsvit_jax import mesh as mesh_lib

PARTS, WIDTH, BATCH = 8, 7, 12


class Votes:
    """A network that only aggregates: each group's token is its own weights times the image."""

    group_axis_limit = PARTS
    part_names = ("groups", "head")
    frozen = frozenset()

    def spread_axis(self, path):
        return 0 if path[0] == "groups" else None

    def apply(self, params, stats, images_BD, *, shard, **_):
        cls_GBD = params["groups"]["weight"][:, None] * images_BD[None]
        return shard.sum(cls_GBD) * params["head"]["weight"][None], stats


def values():
    """(params, images): no two devices' sums are alike."""
    rng = np.random.default_rng(4)
    parts = rng.normal(size=(PARTS, WIDTH)) * np.arange(1, PARTS + 1)[:, None]
    params = {
        "groups": {"weight": parts.astype(np.float32)},
        "head": {"weight": np.ones(WIDTH, np.float32)},
    }
    return params, rng.normal(size=(BATCH, WIDTH)).astype(np.float32)


def exact():
    params, images = values()
    return params["groups"]["weight"].sum(0) * images


def placed(group, data):
    """A mesh with `values` where they belong."""
    mesh = mesh_lib.make(
        group, data, groups=PARTS, batch=BATCH, devices=jax.devices()[: group * data]
    )
    params, images = values()
    params = jax.device_put(params, mesh_lib.state_shardings(mesh, params, Votes()))
    return mesh, params, mesh_lib.put_batch(mesh, images)


def transfers(compiled, group):
    return hlo.count(compiled.as_text(), group)[1]


# --- Aggregation ---------------------------------------------------------------------------------


@functools.cache
def forward(aggregate, group, data):
    """The sum on a mesh, and its program's transfers."""
    mesh, params, images = placed(group, data)
    apply = mesh_lib.spread(Votes(), mesh, aggregate)
    compiled = jax.jit(lambda p, x: apply(p, {}, x)[0]).lower(params, images).compile()
    return np.asarray(compiled(params, images)), transfers(compiled, group)


@pytest.mark.parametrize("group, data", [(2, 2), (4, 2), (8, 1)])
def test_bytes_and_error_of_a_compressed_sum(group, data):
    """Over a ring an all-to-all and an all-gather move what an all-reduce of their bytes would.

    6 examples on each of 2 data devices are filled up to 8 rows for 4 group devices, 12 to 16.
    """
    total, sent = forward("bf16", group, data)
    rows = -(-BATCH // data // group) * group
    assert sent == {("group", kind): rows * 2 * WIDTH for kind in ("all-to-all", "all-gather")}
    params, images = values()
    per_device = params["groups"]["weight"].reshape(group, -1, WIDTH).sum(1)
    votes = np.abs(per_device[:, None] * images)
    bound = (votes.sum(0) + np.abs(exact())) / 256
    error = np.abs(total - exact())
    assert (error <= 1.02 * bound + 1e-6).all()
    assert error.max() > 1e-4


def test_what_is_not_finite_arrives_so():
    mesh, params, images = placed(4, 2)
    places = np.array([1, 5, 9]), np.array([4, 0, 2])
    images = images.at[places].set(np.array([np.nan, np.inf, -np.inf]))
    total, _ = mesh_lib.spread(Votes(), mesh, "bf16")(params, {}, images)
    finite = np.isfinite(total)
    assert not finite[places].any() and finite.sum() == finite.size - 3


def test_one_group_device_sends_and_loses_nothing():
    total, sent = forward("bf16", 1, 2)
    assert sent == {}
    np.testing.assert_array_equal(total, forward("psum", 1, 2)[0])


def test_the_gradient_passes_straight_through():
    """As an all-reduce's, to the bit; and nothing is sent for it over `group`."""
    gradients = []
    for kind in ("psum", "bf16"):
        mesh, params, images = placed(4, 2)
        apply = mesh_lib.spread(Votes(), mesh, kind)
        loss = jax.grad(
            lambda p, x, apply=apply: (apply(p, {}, x)[0] * jnp.arange(1.0, 8)[None]).sum()
        )
        compiled = jax.jit(loss).lower(params, images).compile()
        gradients.append(np.asarray(compiled(params, images)["groups"]["weight"]))
    np.testing.assert_array_equal(*gradients)
    assert np.abs(gradients[0]).min() > 0
    assert {kind for axis, kind in transfers(compiled, 4) if axis == "group"} == {
        "all-to-all",
        "all-gather",
    }


# --- Gradients -----------------------------------------------------------------------------------


@functools.cache
def gradient(kind, group, data):
    """Gradients of `Votes` on a mesh, and the transfers of the program."""
    mesh, params, images = placed(group, data)
    apply = mesh_lib.spread(Votes(), mesh, "psum", kind)
    loss = jax.grad(lambda p, x: (apply(p, {}, x, train=True)[0] ** 2).sum() / 3)
    compiled = jax.jit(loss).lower(params, images).compile()
    return jax.device_get(compiled(params, images)), transfers(compiled, group)


def test_bytes_of_compressed_gradients_are_half():
    """One message for what is split over `group` (2 of 8 groups here), one for the head's."""
    _, plain = gradient("float32", 4, 2)
    _, sent = gradient("bf16", 4, 2)
    numbers = {"split": 2 * WIDTH, "whole": WIDTH}
    assert plain["data", "all-reduce"] == 4 * sum(numbers.values())
    filled = sum(n + n % 2 for n in numbers.values())  # up to equal shares for 2 devices
    assert {k: v for k, v in sent.items() if k[0] == "data"} == {
        ("data", "all-to-all"): 2 * filled,
        ("data", "all-gather"): 2 * filled,
    }
    assert {k: v for k, v in sent.items() if k[0] == "group"} == {
        ("group", "all-reduce"): plain["group", "all-reduce"]
    }


def test_error_of_compressed_gradients():
    """2^-8 of the sum and of the sizes of what is summed: the contributions of 4 data devices."""
    expected, _ = gradient("float32", 2, 4)
    got, _ = gradient("bf16", 2, 4)
    images = values()[1]
    grad_BD = 2 / 3 * exact() * images
    sizes = np.abs(grad_BD.reshape(4, -1, WIDTH).sum(1)).sum(0)
    for row, true in zip(got["groups"]["weight"], expected["groups"]["weight"], strict=True):
        np.testing.assert_allclose(true, grad_BD.sum(0), rtol=1e-4)
        assert (np.abs(row - true) <= 1.01 / 256 * (sizes + np.abs(true))).all()
        assert (row != true).any()
    head = 2 / 3 * np.abs((exact() ** 2).reshape(4, -1, WIDTH).sum(1)).sum(0)
    error = np.abs(got["head"]["weight"] - expected["head"]["weight"])
    assert (error <= 1.01 / 256 * 2 * head).all() and error.any()


def test_one_data_device_keeps_its_gradients():
    jax.tree.map(
        np.testing.assert_array_equal, *(gradient(k, 2, 1)[0] for k in ("float32", "bf16"))
    )
    assert gradient("bf16", 2, 1)[1] == gradient("float32", 2, 1)[1]
