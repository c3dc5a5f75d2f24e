"""A plan as text: aligned tables, and in words what they show."""

from typing import Any

from hsvit_jax import report
from hsvit_jax.planner import costs


def render(result: dict[str, Any]) -> str:
    """A plan as text: the assumptions, the table, the smallest aggregate, waiting, verification."""
    machine, batch = result["machine"], result["batch"]
    raised = ""
    if batch != result["train_batch"]:
        raised = f" (train.batch={result['train_batch']}; a plan needs an image for every device)"
    image = "×".join(map(str, result["image"]))
    lines = [
        f"{result['network']}, images {image}, batch {batch:,}{raised}",
        f"prediction, nothing measured: {machine['flops']:.4g} FLOP/s and "
        f"{machine['bandwidth']:.4g} B/s per device, {machine['latency']:.4g} s × log2 n per "
        "collective over n devices",
        "ring collectives, nothing overlaps; all figures are one device's, per training step",
    ]
    if result["towers"] > 1:
        lines.append(f"towers: a network of {result['towers']} towers, smaller than the others'")
    lines += ["", *_main_table(result["rows"])]
    for way in dict.fromkeys(row["way"] for row in result["left_out"]):
        row = next(r for r in result["left_out"] if r["way"] == way)
        lines.append(
            f"{way}: not at {row['devices']} devices, batch {batch} does not split over "
            f"{row['data']} data devices"
        )
    lines += ["", *_limits(result["rows"])]
    if result["aggregate"]:
        lines += ["", *_aggregate_text(result["aggregate"])]
    if result["idle_time_ratio"]:
        lines += ["", *_idle_text(result["idle_time_ratio"], result["pipeline_stages"])]
    if "verify" in result:
        lines += ["", *_verify_text(result["verify"], result["verify_batch"])]
    if "figure" in result:
        lines += ["", f"figure {result['figure']}"]
    return "\n".join(lines)


def _main_table(rows: list[dict[str, Any]]) -> list[str]:
    sums = [costs.by_axis_and_kind(costs.Transfer(**t) for t in row["transfers"]) for row in rows]
    keys = sorted({key for found in sums for key in found})
    head = ("way", "devices", "data×group", "forward GFLOP", "step GFLOP", "memory", "of it act.")
    head += tuple(f"{axis} {kind}" for axis, kind in keys)
    head += ("step ms", "efficiency", "limit", "ITR eq. 3")
    body = [
        (
            row["way"],
            f"{row['devices']:,}",
            f"{row['data']}×{row['group']}",
            f"{row['forward_flops'] / 1e9:.4g}",
            f"{row['step_flops'] / 1e9:.4g}",
            report.byte_text(row["memory_bytes"]),
            report.byte_text(row["activation_bytes"]),
            *(report.byte_text(found[key]) if key in found else "–" for key in keys),
            f"{1e3 * row['step_seconds']:.4g}",
            f"{row['efficiency']:.1%}",
            row["limit"],
            f"{row['idle_time_ratio']:.2e}" if row["idle_time_ratio"] else "–",
        )
        for row, found in zip(rows, sums, strict=True)
    ]
    return report.aligned([head, *body])


def _limits(rows: list[dict[str, Any]]) -> list[str]:
    """From how many devices on the links take longer than the computation."""
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        slow = [row["devices"] for row in rows if row["way"] == way and row["limit"] == "links"]
        last = max(row["devices"] for row in rows if row["way"] == way)
        told = f"from {slow[0]:,} devices on" if slow else f"not up to {last:,} devices"
        lines.append(f"{way}: in training the links are the limit {told}")
    return lines


def _aggregate_text(rows: list[dict[str, Any]]) -> list[str]:
    table = [("devices", "group", "images", "bytes", "µs", "FLOPs/image", "crossover FLOPs/image")]
    table += [
        (
            f"{row['devices']:,}",
            f"{row['group']}",
            f"{row['images_per_device']:,}",
            f"{row['bytes']:,}",
            f"{1e6 * row['seconds']:.4g}",
            f"{row['forward_flops_per_image']:,}",
            f"{row['crossover_flops_per_image']:,.0f}",
        )
        for row in rows
    ]
    return [
        "the smallest aggregate, one device's CLS sum in a forward pass: images × embedding × bytes"
        " of a number, whatever the network's size.",
        "Above the crossover a device computes longer than it takes, and the links are no limit:",
        *report.aligned(table),
    ]


def _idle_text(rows: list[dict[str, Any]], stages: int) -> list[str]:
    table = [("K", "model", f"pipeline S={stages}", "HSViT", "HSViT as eq. 1 counts")]
    table += [
        (
            f"{row['devices']:,}",
            f"{row['model_parallel']:,.0f}",
            f"{row['pipeline']:,.4g}",
            f"{row['hsvit']:.2e}",
            f"{row['hsvit_elapsed']:.2e}",
        )
        for row in rows
    ]
    return [
        "Idle Time Ratio of K devices, equations 1, 2, 3 (no communication; HSViT: one submodule "
        "of this network on each, one device adds up all CLS tokens).",
        "Equation 3 divides by all devices' time, 1 and 2 by the time that passes; last column: "
        "HSViT by theirs.",
        *report.aligned(table),
    ]


def _verify_text(rows: list[dict[str, Any]], batch: int) -> list[str]:
    table = [("way", "data×group", "program", "quantity", "predicted", "compiled", "difference")]
    for row in rows:
        a, b = row["predicted"], row["compiled"]
        table.append(
            (
                row["way"],
                f"{row['data']}×{row['group']}",
                row["program"],
                row["quantity"],
                f"{a:,}",
                f"{b:,}",
                f"{(a - b) / b:+.2%}" if b else "–" if a == b else "not there",
            )
        )
    return [
        f"verification: compiled for fake CPU devices, float32, {batch} images in all; FLOPs "
        "of matrix products and convolutions, loops unrolled, bytes of collectives;",
        "activations against all the program's temporary memory, its workspace included",
        *report.aligned(table),
    ]
