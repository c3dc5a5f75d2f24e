"""Trained networks as programs that run without this package: StableHLO, ONNX and LiteRT.

A program takes uint8 images, LiteRT's one and the others any number, and contains normalisation and
weights. It is traced with the formulas of accelerators, whose batch may be symbolic. `--parts`
writes one program for each part of the network and one for the head (`models.hsvit.parts`).
"""

import copy
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax import augment, tasks
from hsvit_jax.models import costs
from hsvit_jax.models.hsvit import parts as parts_lib
from hsvit_jax.ops import conv
from hsvit_jax.train import evaluate
from hsvit_jax.weights.stored import Stored

#: Where a StableHLO program runs.
PLATFORMS = ("cpu", "cuda", "tpu")


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to be written.

    Attributes:
      name: of its file, without the suffix.
      function: takes the trees and the inputs.
      trees: parameters and statistics.
      inputs: shapes without the batch, and dtypes, by name; () is a scalar's shape.
      outputs: names.
      groups: numbers of the attention groups that it computes.
    """

    name: str
    function: Callable[..., tuple[jax.Array, jax.Array]]
    trees: tuple[dict, ...]
    inputs: Mapping[str, tuple[tuple[int, ...], Any]]
    outputs: tuple[str, str]
    groups: tuple[int, ...] = ()

    def shapes(self, batch: Any) -> list[jax.ShapeDtypeStruct]:
        """Returns the inputs' shapes for a batch, which may be symbolic."""
        return [
            jax.ShapeDtypeStruct((batch, *shape) if shape else (), dtype)
            for shape, dtype in self.inputs.values()
        ]

    def closed(self, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the function with its weights as constants."""
        return self.function(self.trees, *inputs)

    def flops(self) -> int:
        """Returns the FLOPs for one image: 2 for each multiply-add."""
        return 2 * costs.by_module(self.function, self.trees, *self.shapes(1)).total()


def whole(stored: Stored, name: str) -> list[Program]:
    """Returns the network as one program that averages the views of eval.tta as `predict` does."""
    model, normalise, task = stored.model, _normalise(stored), tasks.of(stored.config)

    def answer(trees: tuple[dict, dict], images_BHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Unused without dropout; jax2onnx cannot reshape the default, an arange over the batch.
        ids_B = images_BHWC[:, 0, 0, 0].astype(jnp.int32)
        views_VBHWC = evaluate.tta_views(normalise(images_BHWC), stored.config.eval.tta)

        def of_view(x_BHWC: jax.Array) -> jax.Array:
            return model.apply(*trees, x_BHWC, example_ids_B=ids_B)[0]

        if len(views_VBHWC) == 1:
            logits_BK = of_view(views_VBHWC[0])
        else:
            logits_BK = jax.lax.map(of_view, views_VBHWC).mean(0)
        return logits_BK, task.answer(logits_BK)

    groups = tuple(range(model.config.groups)) if model.group_axis_limit else ()
    trees = stored.params, stored.stats
    return [Program(name, answer, trees, _images(stored), task.outputs, groups)]


def in_parts(stored: Stored, count: int) -> list[Program]:
    """Returns a program for each of `count` parts, and the head's; ValueError if uncuttable."""
    trees, task = (stored.params, stored.stats), tasks.of(stored.config)
    cut, head = parts_lib.cut(stored.model, *trees, count, _normalise(stored), task.answer)

    def run(part: parts_lib.Part, trees: tuple[dict, dict], images_BHWC: jax.Array) -> Any:
        return dataclasses.replace(part, params=trees[0], stats=trees[1])(images_BHWC)

    def answer(trees: tuple[dict], total_BD: jax.Array, weight: jax.Array) -> Any:
        return dataclasses.replace(head, params=trees[0])(total_BD, weight)

    totals = {"total": ((stored.model.config.embed_dim,), np.float32), "weight": ((), np.float32)}
    programs = [
        Program(
            *(f"part{k}", partial(run, part), (part.params, part.stats), _images(stored)),
            *(tuple(totals), part.groups),
        )
        for k, part in enumerate(cut)
    ]
    return [*programs, Program("head", answer, (head.params,), totals, task.outputs)]


def stablehlo(program: Program) -> bytes:
    """Serialises a program for `jax.export.deserialize`, to run on a CPU, GPU or TPU."""
    from jax import export

    # A program notes the files that wrote its operations; their folders are this machine's.
    folders = "jax_hlo_source_file_canonicalization_regex"
    before = getattr(jax.config, folders)
    jax.config.update(folders, ".*/")
    try:
        with conv.as_on_accelerators():
            (batch,) = export.symbolic_shape("batch")
            exported = export.export(jax.jit(program.closed), platforms=PLATFORMS)
            exported = exported(*program.shapes(batch))
    finally:
        jax.config.update(folders, before)
    try:
        return bytes(exported.serialize())
    except ImportError:
        raise ValueError(
            "--format=stablehlo needs the package flatbuffers: install hsvit_jax[export]"
        ) from None


def onnx(program: Program) -> bytes:
    """Converts a program to ONNX, runs it, and raises ValueError if its numbers differ."""
    try:
        import jax2onnx
        import onnxruntime
    except ImportError:
        raise ValueError(
            "--format=onnx needs the package jax2onnx: install hsvit_jax[onnx], which brings an "
            "older Orbax, in an environment of its own"
        ) from None
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns of every unknown shape
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; it warns of a loop's unused constants
    names = {"input_names": [*program.inputs], "output_names": [*program.outputs]}
    with conv.as_on_accelerators():
        try:
            shapes = program.shapes("batch")
            converted = jax2onnx.to_onnx(program.closed, shapes, **names).SerializeToString()
            session = onnxruntime.InferenceSession(converted, options)
        except Exception as error:  # Plug-ins and runtimes raise arbitrary exceptions.
            raise _refusal("jax2onnx", error) from error
        _check(program, 2, lambda given: session.run(None, given))
    return converted


def tflite(program: Program) -> bytes:
    """Converts a program for one image to LiteRT by StableHLO, runs it, and compares as `onnx`."""
    from ai_edge_litert import interpreter
    from jax import export
    from litert_converter import converter_api_ext
    from litert_converter.mlir import ir, passmanager

    with conv.as_on_accelerators():
        exported = export.export(jax.jit(program.closed), platforms=["cpu"])(*program.shapes(1))
        context, config = ir.Context(), converter_api_ext.ConvertToTFLConfig()
        converter_api_ext.prepare_mlir_context(context)
        try:
            with context:
                module = ir.Module.parse(exported.mlir_module())
                signature = "serving_default", [*program.inputs], [*program.outputs]
                converter_api_ext.set_signature(module.operation, *signature)
                converter_api_ext.run_convert_to_tfl_passes(
                    module, passmanager.PassManager(), config
                )
                converted = converter_api_ext.export_flatbuffer_to_bytes(module.operation)
            run = interpreter.Interpreter(model_content=converted).get_signature_runner()
        except Exception as error:
            raise _refusal("LiteRT's converter", error) from error
        _check(program, 1, lambda given: [run(**given)[name] for name in program.outputs])
    return converted


def _refusal(converter: str, error: Exception) -> ValueError:
    """The error on a network that a converter, which may raise anything, does not take."""
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return ValueError(f"{converter} cannot convert this network, use --format=stablehlo: {reason}")


def _check(program: Program, batch: int, run: Callable[[dict], Sequence[np.ndarray]]) -> None:
    """Raises ValueError if a converted program's numbers differ from its function's."""
    rng = np.random.default_rng(0)
    given = [rng.integers(1, 256, s.shape).astype(s.dtype) for s in program.shapes(batch)]
    # By default accelerators multiply float32 in TF32 or bfloat16, the runtimes do not.
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(program.closed)(*given)
    found = run(dict(zip(program.inputs, given, strict=True)))
    for name, ours, theirs in zip(program.outputs, wanted, found, strict=True):
        error, size = np.abs(ours - theirs).max(), np.abs(ours).max()
        if not error <= 1e-4 * max(size, 1e-3):
            wrong = f"the converted program of {program.name} is wrong: its {name} differ by"
            raise ValueError(f"{wrong} {error:.2g} of {size:.2g}; use --format=stablehlo")


def contents(
    convert: Callable[[Program], bytes],
    stored: Stored,
    about: Mapping[str, Any],
    out: str,
    parts: int | None,
) -> dict[str, str | bytes]:
    """Returns the files of a network's programs, first the JSON that describes them.

    Args:
      convert: `stablehlo`, `onnx` or `tflite`.
      stored: the network.
      about: its description.
      out: name of the file.
      parts: number of parts; None for one program of the whole network.
    """
    form = convert.__name__
    if convert in (onnx, tflite):  # their runtimes compute in float32 on a CPU
        model = copy.copy(stored.model)
        model.dtype = jnp.dtype(jnp.float32)
        stored = stored._replace(model=model)
    programs = whole(stored, Path(out).stem) if parts is None else in_parts(stored, parts)
    files = {f"{program.name}.{form}": convert(program) for program in programs}
    rows = [
        {
            "file": name,
            "groups": list(program.groups),
            "parameters": sum(np.size(x) for x in jax.tree.leaves(program.trees[0])),
            "bytes": len(files[name]),
            "flops": program.flops(),
        }
        for name, program in zip(files, programs, strict=True)
    ]
    sheet = f"{out}.json" if parts is None else "parts.json"
    text = json.dumps({**about, "format": form, "programs": rows}, indent=2)
    return {sheet: text + "\n", **files}


def _normalise(stored: Stored) -> Callable[[jax.Array], jax.Array]:
    data = stored.config.data
    return partial(augment.normalise, mean=tuple(data.mean), std=tuple(data.std))


def _images(stored: Stored) -> dict[str, tuple[tuple[int, ...], Any]]:
    config = stored.model.config
    return {"images": ((*config.image_size, config.image_channels), np.uint8)}
