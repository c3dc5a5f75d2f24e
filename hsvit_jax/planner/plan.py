"""Predicts the cost of a network on more devices than there are: `hsvit plan`.

FLOPs, memory and traffic of a device (`costs`), the time of a step on a machine that three numbers
describe, and the time that devices wait for each other: all are predictions. Tests compare them
with programs that are compiled for a few fake devices.
"""

import functools
import json as json_lib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_collections

from hsvit_jax import artifacts
from hsvit_jax.planner import costs, figure
from hsvit_jax.planner.costs import Cost, Machine, Transfer

#: Stages of the pipeline that the Idle Time Ratio is compared with (S in the paper).
PIPELINE_STAGES = 8


def run(
    config: ml_collections.ConfigDict,
    *,
    devices: int,
    group: int | None = None,
    batch: int | None = None,
    bandwidth: float = 5e10,
    flops: float = 1e14,
    latency: float = 5e-6,
    json: bool = False,
    out: str | Path | None = None,
    moments: float = 2.0,
) -> str:
    """Formats the plan of a resolved configuration for 1, 2, 4, … `devices`.

    Args:
        group: most devices of the group axis; None: as many as divide the network's parts.
        batch: images per step on all devices; None: the smallest multiple of train.batch that
            splits over the data axis of every row.
        bandwidth, flops, latency: of a device, in B/s, FLOP/s and s; see `costs.Machine`.
        json: JSON in place of a table.
        out: a PNG to write.
        moments: values that the optimizer keeps for each parameter.

    Raises:
        ValueError: a group that does not divide, or an impossible machine.
    """
    result = plan(
        config,
        devices=devices,
        group=group,
        batch=batch,
        machine=Machine(flops=flops, bandwidth=bandwidth, latency=latency),
        moments=moments,
    )
    if out:
        figure.draw(result, Path(out))
        result["figure"] = str(out)
    return json_lib.dumps(result, indent=2) if json else render(result)


def counts(devices: int) -> list[int]:
    """1, 2, 4, … and `devices` itself."""
    powers = [2**i for i in range(devices.bit_length())]
    return powers if powers[-1] == devices else [*powers, devices]


def plan(
    config: ml_collections.ConfigDict,
    *,
    devices: int,
    group: int | None,
    batch: int | None,
    machine: Machine,
    moments: float = 2.0,
) -> dict[str, Any]:
    """Computes everything that `run` formats, as plain lists, dicts and numbers.

    Raises:
        ValueError: the configuration cannot be spread so, or too few devices.
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
    submodules = "towers" if "towers" in networks else "replicated"
    result = {
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
        "aggregate": [],
        "idle_time_ratio": [],
    }
    if submodules in networks:
        network = networks[submodules]
        result["aggregate"] = [
            _aggregate(row, machine)
            for row in rows
            if row["way"] == submodules and row["group"] > 1
        ]
        result["idle_time_ratio"] = _idle_table(network, counts(devices), machine)
    return result


def _row(cost: Cost, machine: Machine) -> dict[str, Any]:
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
        "idle_time_ratio": idle_hsvit(cost, machine),
    }


def _aggregate(row: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """The time of the CLS tokens' sum in a forward pass, and the crossover: the FLOPs of an image
    that take as long."""
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
    """Equation 3 as published: T_agg / (K·T_submodule + T_agg), each forward and backward.

    Its denominator is the devices' time together, where equations 1 and 2 divide by the time that
    passes; `idle_elapsed` is the ratio by their definition.
    """
    return aggregation / (devices * submodule + aggregation)


def idle_elapsed(devices: int, submodule: float, aggregation: float) -> float:
    """HSViT's ratio by the definition of equation 1, where K−1 devices wait for one's aggregation:
    (K−1)·T_agg / (T_submodule + T_agg)."""
    return (devices - 1) * aggregation / (submodule + aggregation)


def _times(cost: Cost, devices: int, machine: Machine) -> tuple[float, float]:
    """Seconds of a training step for one submodule, and for the device that adds up all CLS tokens
    and classifies; backward is taken as twice forward. No communication."""
    aggregation = 3 * (cost.head_flops + devices * cost.sum_flops)
    return (cost.step_flops - 3 * cost.head_flops) / machine.flops, aggregation / machine.flops


def idle_hsvit(cost: Cost, machine: Machine) -> float:
    """Equation 3 with each device's part of the group axis as a submodule; 0 for one device."""
    return idle_ratio(cost.group, *_times(cost, cost.group, machine)) if cost.group > 1 else 0.0


def _idle_table(network: Any, devices: Iterable[int], machine: Machine) -> list[dict[str, Any]]:
    """The paper's equations 1 to 3 for K devices: K layers of which one is at work at a time, with
    S pipeline stages in flight, and HSViT with one of this network's parts on each device."""
    way = "towers" if network.config.towers > 1 else "replicated"
    cost = costs.Cost(way, network, data=1, group=network.group_axis_limit, batch=1)
    return [
        {
            "devices": k,
            "model_parallel": k - 1.0,
            "pipeline": (k - 1) / PIPELINE_STAGES,
            "hsvit": idle_ratio(k, *_times(cost, k, machine)) if k > 1 else 0.0,
            "hsvit_elapsed": idle_elapsed(k, *_times(cost, k, machine)),
        }
        for k in devices
    ]


# --- Text -----------------------------------------------------------------------------------------


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
        return costs.by_axis_and_kind(Transfer(**t) for t in row["transfers"])

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
