"""Predicts the cost of a network on many devices: `hsvit plan`.

The figures are FLOPs, memory and traffic of a device (`costs`), the time of a step on a machine of
three numbers, and idle times. Tests compare them with compiled programs for a few fake devices.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import ml_collections

from hsvit_jax import artifacts
from hsvit_jax.planner import costs
from hsvit_jax.planner.costs import Cost, Machine, Transfer

#: Pipeline stages (S in the paper) to compare the Idle Time Ratio with.
PIPELINE_STAGES = 8

Row = dict[str, Any]


def counts(devices: int) -> list[int]:
    """Returns 1, 2, 4, … and `devices` itself."""
    powers = [2**i for i in range(devices.bit_length())]
    return powers if powers[-1] == devices else [*powers, devices]


def plan(
    config: ml_collections.ConfigDict,
    devices: int,
    machine: Machine,
    *,
    group: int | None = None,
    batch: int | None = None,
    moments: float = 2.0,
) -> dict[str, Any]:
    """Plans a resolved configuration for 1, 2, 4, … `devices`, as plain lists, dicts and numbers.

    Args:
        group: most devices of the group axis; it defaults to as many as divide the network's parts.
        batch: images per step on all devices; it defaults to the smallest multiple of train.batch
            that splits over every data axis.
        moments: values that the optimizer keeps for each parameter.

    Raises:
        ValueError: the configuration cannot be spread, or `group` does not divide its parts.
    """
    networks = costs.networks(config)
    layouts = [
        (way, n, costs.group_axis(way, network, n, group))
        for way, network in networks.items()
        for n in counts(devices)
    ]
    chosen = batch
    if batch is None:
        batch = math.lcm(config.train.batch, *(n // g for _, n, g in layouts))
    rows, left_out, alone = [], [], {}
    for way, n, axis in layouts:
        if batch % (n // axis):
            left_out.append({"way": way, "devices": n, "data": n // axis})
            continue
        cost = costs.Cost(
            way,
            networks[way],
            data=n // axis,
            group=axis,
            batch=batch,
            aggregate=config.mesh.aggregate,
            gradients=config.mesh.gradients,
            moments=moments + (config.train.ema_decay > 0),
        )
        row = _row(cost, machine)
        alone.setdefault(way, row["step_seconds"])
        row["efficiency"] = alone[way] / (n * row["step_seconds"])
        rows.append(row)
    parts = "towers" if "towers" in networks else "replicated"
    spread = [row for row in rows if row["way"] == parts and row["group"] > 1]
    return {
        "label": "prediction",
        "network": f"{config.model.variant} ({config.model.family})",
        "image": [*config.data.image_size, config.data.channels],
        "machine": vars(machine),
        "batch": batch,
        "train_batch": config.train.batch,
        "raised": chosen is None and batch > config.train.batch,
        "pipeline_stages": PIPELINE_STAGES,
        "towers": networks["towers"].config.towers if "towers" in networks else 1,
        "rows": rows,
        "left_out": left_out,
        "aggregate": [_aggregate(row, machine) for row in spread],
        "idle_time_ratio": _idle_table(networks.get(parts), counts(devices), machine),
    }


def _row(cost: Cost, machine: Machine) -> Row:
    compute = cost.step_flops / machine.flops
    sending = sum(machine.seconds(t) for t in cost.step)
    forward = sum(machine.seconds(t) for t in cost.forward)
    names = ("way", "devices", "data", "group", "images_per_device", "forward_flops", "step_flops")
    names += ("memory_bytes", "parameter_bytes", "optimizer_bytes", "activation_bytes")
    return {
        **{name: getattr(cost, name) for name in names},
        "transfers": [vars(t) for t in cost.step],
        "compute_seconds": compute,
        "communication_seconds": sending,
        "step_seconds": compute + sending,
        "forward_seconds": cost.forward_flops / machine.flops + forward,
        "limit": "links" if sending > compute else "compute",
        "idle_time_ratio": _idle(cost, cost.group, machine),
    }


def _aggregate(row: Row, machine: Machine) -> Row:
    """The time of the CLS tokens' sum, and the FLOPs of an image that take as long (crossover)."""
    sent = [Transfer(**t) for t in row["transfers"] if t["what"] == costs.CLS_TOKENS]
    seconds, images = sum(map(machine.seconds, sent)), row["images_per_device"]
    return {
        **{name: row[name] for name in ("devices", "group", "images_per_device")},
        "bytes": sum(t.bytes for t in sent),
        "seconds": seconds,
        "forward_flops_per_image": row["forward_flops"] // images,
        "crossover_flops_per_image": seconds * machine.flops / images,
    }


# --- Idle Time Ratio -----------------------------------------------------------------------------


def idle_ratio(devices: int, submodule: float, aggregation: float) -> float:
    """Computes equation 3 as published: T_agg / (K·T_submodule + T_agg).

    It divides by the time of all devices; equations 1 and 2 divide by the elapsed time.
    """
    return aggregation / (devices * submodule + aggregation)


def idle_elapsed(devices: int, submodule: float, aggregation: float) -> float:
    """Computes HSViT's ratio as equation 1 defines it: (K−1)·T_agg / (T_submodule + T_agg)."""
    return (devices - 1) * aggregation / (submodule + aggregation)


def _idle(cost: Cost, devices: int, machine: Machine) -> float:
    """Equation 3 with each device's part of the group axis as a submodule; 0 for one device."""
    return idle_ratio(devices, *_times(cost, devices, machine)) if devices > 1 else 0.0


def _times(cost: Cost, devices: int, machine: Machine) -> tuple[float, float]:
    """Seconds of a submodule, and of the device that sums all CLS tokens and classifies, in a step.

    Backward counts as twice forward; communication is excluded.
    """
    aggregation = 3 * (cost.head_flops + devices * cost.sum_flops)
    return (cost.step_flops - 3 * cost.head_flops) / machine.flops, aggregation / machine.flops


def _idle_table(network: Any, devices: Iterable[int], machine: Machine) -> list[Row]:
    """The paper's equations 1 to 3 for K devices; none for a network without groups.

    The models are K layers of which one works at a time, S pipeline stages in flight, and HSViT
    with one of this network's parts on each device.
    """
    if network is None:
        return []
    way = "towers" if network.config.towers > 1 else "replicated"
    cost = costs.Cost(way, network, data=1, group=network.group_axis_limit, batch=1)
    return [
        {
            "devices": k,
            "model_parallel": k - 1.0,
            "pipeline": (k - 1) / PIPELINE_STAGES,
            "hsvit": _idle(cost, k, machine),
            "hsvit_elapsed": idle_elapsed(k, *_times(cost, k, machine)),
        }
        for k in devices
    ]


# --- Text -----------------------------------------------------------------------------------------


def render(result: dict[str, Any]) -> str:
    """Formats a plan: assumptions, costs, the smallest aggregate, idle times."""
    machine, batch, rows = result["machine"], result["batch"], result["rows"]
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
    lines += ["", *_main_table(rows)]
    first: dict[str, Row] = {}
    for row in result["left_out"]:
        first.setdefault(row["way"], row)
    for way, row in first.items():
        lines.append(
            f"{way}: not at {row['devices']} devices, batch {batch} does not split over "
            f"{row['data']} data devices"
        )
    lines.append("")
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        slow = [row["devices"] for row in own if row["limit"] == "links"]
        last = max(row["devices"] for row in own)
        where = f"from {slow[0]:,} devices on" if slow else f"not up to {last:,} devices"
        lines.append(f"{way}: in training the links are the limit {where}")
    if result["aggregate"]:
        lines += [
            "",
            "the smallest aggregate, one device's CLS sum in a forward pass: images × embedding × "
            "bytes of a number, whatever the network's size (mesh.aggregate=ordered: times the "
            "groups; bf16: sent twice).",
            "Above the crossover a device computes longer than it takes, and the links are no "
            "limit:",
            *artifacts.aligned(artifacts.table(_AGGREGATE, result["aggregate"])),
        ]
    if result["idle_time_ratio"]:
        lines += [
            "",
            "Idle Time Ratio of K devices, equations 1, 2, 3 (no communication; HSViT: one "
            "submodule of this network on each, one device adds up all CLS tokens).",
            "Equation 3 divides by all devices' time, 1 and 2 by the elapsed time; last column: "
            "HSViT by theirs.",
            *artifacts.aligned(artifacts.table(_IDLE, result["idle_time_ratio"])),
        ]
    if "figure" in result:
        lines += ["", f"figure {result['figure']}"]
    return "\n".join(lines)


def _main_table(rows: Sequence[Row]) -> list[str]:
    def sent(row: Row) -> dict[tuple[str, str], int]:
        return costs.by_axis_and_kind(Transfer(**t) for t in row["transfers"])

    def bytes_sent(row: Row, key: tuple[str, str]) -> str:
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


_AGGREGATE = {
    "devices": lambda row: f"{row['devices']:,}",
    "group": lambda row: f"{row['group']}",
    "images": lambda row: f"{row['images_per_device']:,}",
    "bytes": lambda row: f"{row['bytes']:,}",
    "µs": lambda row: f"{1e6 * row['seconds']:.4g}",
    "FLOPs/image": lambda row: f"{row['forward_flops_per_image']:,}",
    "crossover FLOPs/image": lambda row: f"{row['crossover_flops_per_image']:,.0f}",
}
_IDLE = {
    "K": lambda row: f"{row['devices']:,}",
    "model": lambda row: f"{row['model_parallel']:,.0f}",
    f"pipeline S={PIPELINE_STAGES}": lambda row: f"{row['pipeline']:,.4g}",
    "HSViT": lambda row: f"{row['hsvit']:.2e}",
    "HSViT as eq. 1 counts": lambda row: f"{row['hsvit_elapsed']:.2e}",
}
