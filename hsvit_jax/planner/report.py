"""Formats a plan as text: aligned tables, and sentences on them."""

import functools
from typing import Any

from hsvit_jax import artifacts
from hsvit_jax.planner import costs


def render(result: dict[str, Any]) -> str:
    """Formats a plan: assumptions, costs, the smallest aggregate, idle times."""
    machine, batch = result["machine"], result["batch"]
    raised = ""
    if result["raised"]:
        raised = f" (train.batch={result['train_batch']}; a batch for all these numbers of devices)"
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
    if "figure" in result:
        lines += ["", f"figure {result['figure']}"]
    return "\n".join(lines)


def _main_table(rows: list[dict[str, Any]]) -> list[str]:
    def sent(row: dict[str, Any]) -> dict[tuple[str, str], int]:
        return costs.by_axis_and_kind(costs.Transfer(**t) for t in row["transfers"])

    def bytes_sent(row: dict[str, Any], key: tuple[str, str]) -> str:
        return artifacts.byte_text(sent(row)[key]) if key in sent(row) else "–"

    columns = {
        "way": lambda row: row["way"],
        "devices": lambda row: f"{row['devices']:,}",
        "data×group": lambda row: f"{row['data']}×{row['group']}",
        "forward GFLOP": lambda row: f"{row['forward_flops'] / 1e9:.4g}",
        "step GFLOP": lambda row: f"{row['step_flops'] / 1e9:.4g}",
        "memory": lambda row: artifacts.byte_text(row["memory_bytes"]),
        "of it act.": lambda row: artifacts.byte_text(row["activation_bytes"]),
    }
    for key in sorted({key for row in rows for key in sent(row)}):
        columns[" ".join(key)] = functools.partial(bytes_sent, key=key)
    columns |= {
        "step ms": lambda row: f"{1e3 * row['step_seconds']:.4g}",
        "efficiency": lambda row: f"{row['efficiency']:.1%}",
        "limit": lambda row: row["limit"],
        "ITR eq. 3": lambda row: f"{row['idle_time_ratio']:.2e}" if row["idle_time_ratio"] else "–",
    }
    return artifacts.aligned(artifacts.table(columns, rows))


def _limits(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        slow = [row["devices"] for row in rows if row["way"] == way and row["limit"] == "links"]
        last = max(row["devices"] for row in rows if row["way"] == way)
        where = f"from {slow[0]:,} devices on" if slow else f"not up to {last:,} devices"
        lines.append(f"{way}: in training the links are the limit {where}")
    return lines


def _aggregate_text(rows: list[dict[str, Any]]) -> list[str]:
    columns = {
        "devices": lambda row: f"{row['devices']:,}",
        "group": lambda row: f"{row['group']}",
        "images": lambda row: f"{row['images_per_device']:,}",
        "bytes": lambda row: f"{row['bytes']:,}",
        "µs": lambda row: f"{1e6 * row['seconds']:.4g}",
        "FLOPs/image": lambda row: f"{row['forward_flops_per_image']:,}",
        "crossover FLOPs/image": lambda row: f"{row['crossover_flops_per_image']:,.0f}",
    }
    return [
        "the smallest aggregate, one device's CLS sum in a forward pass: images × embedding × bytes"
        " of a number, whatever the network's size (mesh.aggregate=ordered: times the groups; "
        "bf16: sent twice).",
        "Above the crossover a device computes longer than it takes, and the links are no limit:",
        *artifacts.aligned(artifacts.table(columns, rows)),
    ]


def _idle_text(rows: list[dict[str, Any]], stages: int) -> list[str]:
    columns = {
        "K": lambda row: f"{row['devices']:,}",
        "model": lambda row: f"{row['model_parallel']:,.0f}",
        f"pipeline S={stages}": lambda row: f"{row['pipeline']:,.4g}",
        "HSViT": lambda row: f"{row['hsvit']:.2e}",
        "HSViT as eq. 1 counts": lambda row: f"{row['hsvit_elapsed']:.2e}",
    }
    return [
        "Idle Time Ratio of K devices, equations 1, 2, 3 (no communication; HSViT: one submodule "
        "of this network on each, one device adds up all CLS tokens).",
        "Equation 3 divides by all devices' time, 1 and 2 by the time that passes; last column: "
        "HSViT by theirs.",
        *artifacts.aligned(artifacts.table(columns, rows)),
    ]
