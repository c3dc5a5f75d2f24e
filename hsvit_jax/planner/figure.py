"""Draws a plan: efficiency, the smallest aggregate, idle time, and schedules."""

from pathlib import Path
from typing import Any

from hsvit_jax import artifacts

_COLOURS = {"data": "#777777", "replicated": "#d08a00", "sharded": "#2a7ab8", "towers": "#1b8a4b"}
_FORWARD, _BACKWARD, _TOGETHER = "#8fb8de", "#e6a57e", "#c0504d"
_DEVICES, _MICRO_BATCHES = 4, 2  # of the schedules in the lower row


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws a PNG of a plan.

    The lower row shows schedules as the paper's figure 4 does: four devices, a pipeline with two
    micro-batches. Source: HSViT paper, section 3.2.

    Args:
        path: the PNG; its folder is made.
    """
    figure = artifacts.figure(14, 7, dpi=110)
    (efficiency, aggregate, idle), schedules = figure.subplots(2, 3, height_ratios=(3, 1))
    _efficiency(efficiency, result["rows"])
    _aggregate(aggregate, result["aggregate"])
    _idle(idle, result["idle_time_ratio"], result["pipeline_stages"])
    for axes, (name, bars, end) in zip(schedules, _schedules(), strict=True):
        _schedule(axes, name, bars, end)
    machine = result["machine"]
    figure.suptitle(
        f"{result['network']}, batch {result['batch']:,}: prediction for {machine['flops']:.3g} "
        f"FLOP/s, {machine['bandwidth']:.3g} B/s, {machine['latency']:.3g} s a stage"
    )
    artifacts.save_figure(figure, path)


def _efficiency(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws efficiency by devices; a ring marks where links begin to take longer than computing."""
    ring = {"markersize": 12, "fillstyle": "none"}
    for way in dict.fromkeys(row["way"] for row in rows):
        points = [row for row in rows if row["way"] == way]
        x, y = ([row[key] for row in points] for key in ("devices", "efficiency"))
        axes.plot(x, y, marker=".", color=_COLOURS[way], label=way)
        slow = next((row for row in points if row["limit"] == "links"), None)
        if slow:
            axes.plot(slow["devices"], slow["efficiency"], "o", color=_COLOURS[way], **ring)
    axes.plot([], [], "o", color="black", label="links the limit", **ring)
    axes.set(ylim=(0, 1.05), xlabel="devices", ylabel="efficiency", title="Training step")
    axes.set_xscale("log", base=2)
    axes.legend()


def _aggregate(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws the FLOPs of one image on one device, and the crossover with the CLS sum's time."""
    axes.set(xlabel="devices", ylabel="FLOPs per image and device", title="Forward: the CLS sum")
    if not rows:
        _note(axes, "no groups on several devices: nothing to aggregate")
        return
    x = [row["devices"] for row in rows]
    flops = [row["forward_flops_per_image"] for row in rows]
    limit = [row["crossover_flops_per_image"] for row in rows]
    axes.plot(x, flops, marker=".", color=_COLOURS["towers"], label="this network")
    axes.plot(x, limit, color="black", linestyle="--", label="crossover: computing = aggregate")
    axes.fill_between(x, limit, min(*flops, *limit) / 2, color=_TOGETHER, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.annotate("links the limit", (x[0], min(*flops, *limit) / 1.8), color=_TOGETHER)
    axes.legend()


def _idle(axes: Any, rows: list[dict[str, Any]], stages: int) -> None:
    axes.set(xlabel="devices", ylabel="Idle Time Ratio", title="Waiting, communication aside")
    rows = [row for row in rows if row["devices"] > 1]
    if not rows:
        _note(axes, "no groups on several devices: nobody waits")
        return
    x = [row["devices"] for row in rows]
    for key, name, style in (
        ("model_parallel", "model parallelism (eq. 1)", "-"),
        ("pipeline", f"pipeline, S={stages} (eq. 2)", "-"),
        ("hsvit", "HSViT (eq. 3)", "-"),
        ("hsvit_elapsed", "HSViT, as eq. 1 counts", "--"),
    ):
        axes.plot(x, [row[key] for row in rows], style, marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(top=100 * rows[-1]["model_parallel"])  # room for the legend
    axes.legend(loc="upper left")


def _note(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)


def _schedules() -> list[tuple[str, list[tuple[int, float, float, str, str]], float]]:
    last, micro = _DEVICES - 1, _MICRO_BATCHES
    model = [(d, float(d), 1.0, f"F{d}", _FORWARD) for d in range(_DEVICES)]
    model += [(d, float(_DEVICES + last - d), 1.0, f"B{d}", _BACKWARD) for d in range(_DEVICES)]
    pipeline, width = [], 1 / micro
    middle = (_DEVICES + micro - 1) * width
    for m in range(micro):
        for d in range(_DEVICES):
            pipeline.append((d, (d + m) * width, width, f"F{d},{m}", _FORWARD))
            start = middle + (last - d + m) * width
            pipeline.append((d, start, width, f"B{d},{m}", _BACKWARD))
    ours = []
    for d in range(_DEVICES):
        ours.append((d, 0.0, 1.0, f"F sub {d}", _FORWARD))
        ours.append((d, 1.2, 1.0, f"B sub {d}", _BACKWARD))
    ours.append((0, 1.0, 0.2, "", _TOGETHER))
    return [
        ("Model parallelism", model, 2.0 * _DEVICES),
        ("Pipeline parallelism, two micro-batches", pipeline, 2 * middle),
        ("HSViT (red: aggregation)", ours, 2.2),
    ]


def _schedule(
    axes: Any, name: str, bars: list[tuple[int, float, float, str, str]], end: float
) -> None:
    """Draws a row per device, time to the right; gaps are waiting."""
    for device, start, length, text, colour in bars:
        axes.barh(device, length, left=start, color=colour, edgecolor="white")
        axes.text(start + length / 2, device, text, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, end), yticks=range(_DEVICES), xticks=[], title=f"{name} (scheme)")
    axes.set_yticklabels([f"device {d}" for d in range(_DEVICES)])
    axes.invert_yaxis()
