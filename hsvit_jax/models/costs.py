"""Costs of a network: its modules, parameters, FLOPs, and the memory of compiled programs.

FLOPs are two for each multiply-add of a matrix product or convolution, as the literature counts
them, read from the jaxpr: XLA's own count omits what a GPU's libraries compute, and all turns
of a loop but one. The memory that a compiled program holds is asked of XLA, for the back end at
hand. Nothing is computed or allocated: shapes alone are enough.
"""

import collections
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval

from hsvit_jax.ops import conv


def modules(model: Any) -> list[tuple[str, int, int]]:
    """A network's modules, down to the blocks, in order of computation.

    Returns:
        (path, parameters, multiply-adds of one image) of each; a product of two activations, such
        as attention's, counts for the module that computed the later one.
    """
    shapes = _shapes(model, 1)
    macs = by_module(lambda trees, x: model.apply(*trees, x)[0], shapes[:2], shapes[2])
    parameters = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes[:1]):
        parameters[module_of(path)] += leaf.size
    macs.update(model.saved_multiply_adds())
    return [(path, parameters[path], n) for path, n in macs.items() if n or path in parameters]


def by_module(function: Any, trees: tuple[dict, ...], *inputs: Any) -> collections.Counter[str]:
    """Multiply-adds of function(trees, *inputs) by module, from the shapes of its arguments.

    Args:
        function: a forward pass, or a part of one.
        trees: parameters and statistics.
        inputs: arrays that are not the network's.
    """
    with conv.as_on_accelerators():
        traced = jax.make_jaxpr(function)(trees, *inputs)
    paths = [module_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(trees)]
    macs: collections.Counter[str] = collections.Counter()
    _count(traced.jaxpr, [(0, path) for path in paths] + [(1, "")] * len(inputs), 1, macs)
    return macs


def parameters(model: Any) -> int:
    """Exact number of trained values, by `eval_shape`."""
    params, _ = model.init_shapes()
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def multiply_adds(model: Any) -> int:
    """Multiply-adds of matrix products and convolutions of one image's forward pass."""
    return sum(macs for *_, macs in modules(model))


def flops(model: Any) -> int:
    """FLOPs of one image forward: 2 for each multiply-add of a matrix product or convolution."""
    return 2 * multiply_adds(model)


def computed_flops(model: Any) -> int:
    """`flops` less what is not computed: HSViT's last attention block has one query, its CLS."""
    return _traced_flops(lambda p, s, x: model.apply(p, s, x)[0], *_shapes(model, 1))


def training_flops(model: Any) -> float:
    """FLOPs of one image forward and backward, recomputation included, the optimizer not.

    Those of two images are halved, as a map of a single pixel has no moments in a batch of one.
    """
    return _traced_flops(_gradient(model), *_training_shapes(model, 2)) / 2


def _traced_flops(function: Any, *args: Any) -> int:
    with conv.as_on_accelerators():
        traced = jax.make_jaxpr(function)(*args).jaxpr
    used, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    return 2 * _total(used)


def _total(jaxpr: Jaxpr) -> int:
    """Multiply-adds of a computation and of those that it calls."""
    total = 0
    for eqn in jaxpr.eqns:
        calls = [_total(inner) for inner in _inner(eqn)]
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += turns * sum(calls) if calls else _multiply_adds(eqn)
    return total


def forward_bytes(model: Any, batch: int) -> int:
    """Peak bytes of the compiled evaluation forward of `batch` images, its arguments included."""
    forward = jax.jit(lambda p, s, x: model.apply(p, s, x)[0])
    return peak_bytes(forward.lower(*_shapes(model, batch)).compile())


def training_bytes(model: Any, batch: int) -> int:
    """Peak bytes of a compiled forward and backward pass of `batch` images.

    Parameters, images and gradients included; the optimizer's moments are not part of it.
    """
    lowered = jax.jit(_gradient(model)).lower(*_training_shapes(model, batch))
    return peak_bytes(lowered.compile())


def _gradient(model: Any) -> Any:
    """The forward and backward pass of a batch; nothing is augmented."""

    def loss(params: dict, stats: dict, images: jax.Array, labels: jax.Array, key: jax.Array):
        logits, stats = model.apply(params, stats, images, train=True, dropout_key=key)
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -scores.mean(), stats

    return jax.grad(loss, has_aux=True)


def _training_shapes(model: Any, batch: int) -> tuple[Any, ...]:
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return *_shapes(model, batch), labels, jax.eval_shape(jax.random.key, 0)


def peak_bytes(program: Any) -> int:
    """Arguments, results and what is held between them: no back end reports less than it uses."""
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return int(held + memory.temp_size_in_bytes - memory.alias_size_in_bytes)


def module_of(path: tuple[Any, ...]) -> str:
    """The module that a leaf belongs to: down to the first index, or the second name."""
    names = [str(key.key) for key in path if hasattr(key, "key")][:-1]
    # An HVT's pools are `after0` and so on, by their block.
    end = next((i for i, name in enumerate(names) if name.removeprefix("after").isdigit()), 1)
    while end + 1 < len(names) and names[end + 1].isdigit():
        end += 1
    return ".".join(names[: end + 1])


#: (time, module) of an activation; time 0 for a weight and for a function of weights alone.
_Label = tuple[int, str]


def _count(
    jaxpr: Jaxpr, inputs: list[_Label | None], times: int, macs: collections.Counter[str]
) -> list[_Label | None]:
    """Adds the multiply-adds of `times` runs to `macs`; labels are None for a constant.

    A function of a weight and an activation belongs to the weight's module, one of activations to
    the latest one's. A product with a constant, such as an interpolation's, counts nothing.
    """
    labels = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        operands = [None if isinstance(v, Literal) else labels.get(v) for v in eqn.invars]
        weights = [label for label in operands if label and not label[0]]
        activations = [label for label in operands if label and label[0]]
        label = max(activations, default=weights[0] if weights else None)
        if weights and activations:
            label = (label[0] + 1, weights[0][1])
        outputs, calls = [label] * len(eqn.outvars), list(_inner(eqn))
        if label and not calls:  # modules come in order, so that a call counts when it is looked at
            macs[label[1]] += 0 if None in operands else times * _multiply_adds(eqn)
        for inner in calls:
            turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            outputs = _count(inner, operands, times * turns, macs)
        labels.update(zip(eqn.outvars, outputs, strict=True))
    return [None if isinstance(v, Literal) else labels.get(v) for v in jaxpr.outvars]


def _inner(eqn: Any) -> Iterator[Jaxpr]:
    """The computations that an equation calls with its own operands."""
    for value in eqn.params.values():
        inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        if isinstance(inner, Jaxpr) and len(inner.invars) == len(eqn.invars):
            yield inner


def _multiply_adds(eqn: Any) -> int:
    """Those of one matrix product or convolution, padding counted; 0 for anything else."""
    size = math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return size * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
        # In the gradient of a strided convolution zeros lie between the values.
        zeros = math.prod(eqn.params["lhs_dilation"])
        return size * math.prod(kernel) // (kernel[spec[0]] * zeros)
    return 0


def _shapes(model: Any, batch: int) -> tuple[dict, dict, jax.ShapeDtypeStruct]:
    params, stats = model.init_shapes()
    size = (batch, *model.config.image_size, model.config.image_channels)
    return params, stats, jax.ShapeDtypeStruct(size, jnp.float32)
