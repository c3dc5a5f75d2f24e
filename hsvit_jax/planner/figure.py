"""Draws a plan: efficiency, the smallest aggregate and idle time."""

from pathlib import Path
from typing import Any

from hsvit_jax import artifacts

_COLOURS = {"data": "#777777", "replicated": "#d08a00", "sharded": "#2a7ab8", "towers": "#1b8a4b"}
_LIMIT = "#c0504d"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws a PNG of a plan; its folder is made."""
    figure = artifacts.figure(14, 5, dpi=110)
    efficiency, aggregate, idle = figure.subplots(1, 3)
    _efficiency(efficiency, result["rows"])
    _aggregate(aggregate, result["aggregate"])
    _idle(idle, result["idle_time_ratio"], result["pipeline_stages"])
    machine = result["machine"]
    figure.suptitle(
        f"{result['network']}, batch {result['batch']:,}: prediction for {machine['flops']:.3g} "
        f"FLOP/s, {machine['bandwidth']:.3g} B/s, {machine['latency']:.3g} s a stage"
    )
    artifacts.save_figure(figure, path)


def _efficiency(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws efficiency by devices; a ring marks the first limit by the links."""
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
    axes.fill_between(x, limit, min(*flops, *limit) / 2, color=_LIMIT, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.annotate("links the limit", (x[0], min(*flops, *limit) / 1.8), color=_LIMIT)
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
