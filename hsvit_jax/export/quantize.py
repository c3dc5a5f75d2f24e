"""Int8 programs: ONNX with quantised weights and activations, and what that costs in accuracy.

Weights have a scale for each output channel, activations one scale and zero point each, from the
ranges that training images cause. Source: Jacob et al., 2018 (arXiv:1712.05877), section 2.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax import artifacts, data, tasks, train
from hsvit_jax.export import programs
from hsvit_jax.runtime import coordination
from hsvit_jax.weights.stored import Stored

_CALIBRATION, _BATCH = 256, 32  # images
_MEASURED = 5000  # images of a split, at most
_HEAD = "head.onnx"  # of parts; it stays in float32, as it has hardly any weights


def contents(
    stored: Stored, about: Mapping[str, Any], out: str, parts: int | None
) -> dict[str, str | bytes]:
    """Returns a network's int8 programs, first the JSON that describes them, and prints the costs.

    A program answers for one view of an image.

    Args:
      stored, about, out, parts: as in `programs.contents`.

    Raises:
      ValueError: the run's data have other classes, or as `programs.onnx`.
    """
    tasks.refuse_others(stored.config, "--quantize")
    config = stored.config.copy_and_resolve_references().unlock()
    config.eval.tta = "none"
    dataset = train.load_data(config)
    if dataset.info.class_names != stored.class_names:
        raise ValueError(
            f"{config.data.name} has other classes than the network, and int8 needs its images: "
            "export a run of these data"
        )
    made = programs.contents(
        programs.onnx, stored._replace(config=config), {**about, "measured": {}}, out, parts
    )
    sheet = next(iter(made))
    described = json.loads(made.pop(sheet))
    images = _some(dataset.train, _CALIBRATION)[0]
    files = {name: x if name == _HEAD else quantise(x, images) for name, x in made.items()}
    for row in described["programs"]:
        row |= {"float_bytes": row["bytes"], "bytes": len(files[row["file"]])}
    described["int8"] = costs = [
        {"split": name, **_compare(made, files, getattr(dataset, name))}
        for name in ("val", "test")
        if len(getattr(dataset, name))
    ]
    heads = "split", "images", "float32", "int8", "other answers"
    cells = [[f"{x:.2%}" if isinstance(x, float) else str(x) for x in y.values()] for y in costs]
    sizes = (artifacts.byte_text(sum(map(len, x.values()))) for x in (made, files))
    lines = [*artifacts.aligned([heads, *cells]), f"float32 {next(sizes)}, int8 {next(sizes)}"]
    coordination.print_once("\n".join(lines))
    return {sheet: json.dumps(described, indent=2) + "\n", **files}


def quantise(program: bytes, images_NHWC: np.ndarray) -> bytes:
    """Quantises the convolutions and matrix products of an ONNX program.

    Args:
      images_NHWC: uint8, whose activations set the ranges.
    """
    import onnx
    import onnxruntime
    from onnxruntime import quantization
    from onnxruntime.quantization import shape_inference

    class Images(quantization.CalibrationDataReader):
        batches = ({"images": batch} for batch in _batches(images_NHWC))

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    onnxruntime.set_default_logger_severity(3)  # errors; it warns of unused constants
    model = onnx.load_from_string(program)
    _as_products(model.graph)
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("float", "folded", "int8")]
        onnx.save(model, paths[0])
        shape_inference.quant_pre_process(*paths[:2], skip_symbolic_shape=True)
        quantization.quantize_static(
            *paths[1:],
            Images(),
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=["Conv", "MatMul", "Gemm"],
        )
        return Path(paths[2]).read_bytes()


def _as_products(graph: Any) -> None:
    """Rewrites dense layers as operations that ONNX Runtime quantises.

    Einsums such as gbtd,gde->gbte become MatMul; Gemm loses a bias that is the number 0.
    """
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Gemm" and len(node.input) > 2:
            bias = weights.get(node.input[2])
            if bias is not None and not bias.dims and not numpy_helper.to_array(bias):
                del node.input[2]
        if node.op_type != "Einsum" or node.input[1] not in weights:
            continue
        equation = node.attribute[0].s.decode().replace(" ", "").replace("->", ",")
        left, right, out = equation.split(",")
        shared = left.startswith(right[:-2]) and left[-1] == right[-2]
        if shared and out == left[:-1] + right[-1]:
            tensor = weights[node.input[1]]
            *batch, rows, columns = tensor.dims
            ones = [1] * (len(left) - len(right))
            del tensor.dims[:], node.attribute[:]
            tensor.dims.extend([*batch, *ones, rows, columns])
            node.op_type = "MatMul"
    del graph.value_info[:]  # their ranks were those of the einsums


def _batches(images_NHWC: np.ndarray) -> list[np.ndarray]:
    return np.split(images_NHWC, range(_BATCH, len(images_NHWC), _BATCH))


def _some(split: data.Split, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most so many images and labels, evenly from the split."""
    index = np.unique(np.linspace(0, len(split) - 1, min(most, len(split))).astype(int))
    return split.gather(index), split.labels[index]


def _compare(
    floats: Mapping[str, bytes], ints: Mapping[str, bytes], split: data.Split
) -> dict[str, Any]:
    """Accuracies on a split, and how many images the int8 programs answer otherwise."""
    images, labels = _some(split, _MEASURED)
    before, after = _classes(floats, images), _classes(ints, images)
    right = {"float32": float((before == labels).mean()), "int8": float((after == labels).mean())}
    return {"examples": len(labels), **right, "other_answers": int((before != after).sum())}


def _classes(files: Mapping[str, bytes], images_NHWC: np.ndarray) -> np.ndarray:
    """The predicted classes, int (N,), of a program or of parts with their head."""
    import onnxruntime

    run = {name: onnxruntime.InferenceSession(content).run for name, content in files.items()}
    head, found = run.pop(_HEAD, None), []
    for batch in _batches(images_NHWC):
        outputs = [part(None, {"images": batch}) for part in run.values()]
        if head:
            total, weight = (np.asarray(sum(x), np.float32) for x in zip(*outputs, strict=True))
            outputs = [head(None, {"total": total, "weight": weight})]
        found.append(outputs[0][0].argmax(1))
    return np.concatenate(found)
