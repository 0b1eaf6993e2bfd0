"""What a reader sees at the end: one table, one plot, one JSON."""

import json
import math
import platform
from datetime import datetime, timezone
from pathlib import Path

import torch

import te_mx

INK, MUTED, BAND = "#1f2933", "#7b8794", "#e4e7eb"
# A title gives no ratio of speeds of fewer steps, or where the 90th percentile of their times is
# more than so many times the 10th.
LEAST_STEPS, MOST_SCATTER = 50, 1.5
COLORS = {"plain": "#2f6fb0", "mxfp8": "#d9622b"}


def machine() -> dict:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].split(":", 1)[1].strip() if models else cpu
    return {
        "cpu": cpu,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "te_mx": te_mx.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def compare(plain: dict, mxfp8: dict) -> dict:
    """gap = (L_mxfp8 - L_plain) / L_plain in percent; speedup = tokens/s over tokens/s."""
    return {
        "gap_percent": 100 * (mxfp8["val_loss"] - plain["val_loss"]) / plain["val_loss"],
        "speedup": mxfp8["tokens_per_second"] / plain["tokens_per_second"],
    }


def both(runs: dict[str, dict]) -> tuple[dict, dict] | None:
    """(plain, mxfp8) when there are two runs that trained equally long, of the same seeds."""
    plain = next((run for mode, run in runs.items() if mode != "mxfp8"), None)
    if plain is None or "mxfp8" not in runs:
        return None
    mxfp8 = runs["mxfp8"]
    alike = plain["steps"] == mxfp8["steps"] and plain["seeds"].keys() == mxfp8["seeds"].keys()
    return (plain, mxfp8) if alike else None


def is_steady(run: dict) -> bool:
    """Whether the speed of a run says something: enough steps, that took about as long."""
    low, _, high = run["step_seconds"]
    return run["steps"] >= LEAST_STEPS and high <= MOST_SCATTER * low


def gaps_by_seed(plain: dict, mxfp8: dict) -> list[float]:
    """The gap of every seed in percent."""
    pairs = ((loss, mxfp8["seeds"][seed]) for seed, loss in plain["seeds"].items())
    return [100 * (ours - theirs) / theirs for theirs, ours in pairs]


def shown(runs: dict[str, dict], mode: str) -> str:
    """What a run is called: by its recipe, if it has one."""
    recipe: str = runs.get("mxfp8", {}).get("settings", {}).get("recipe", mode)
    return recipe if mode == "mxfp8" else mode


def table(runs: dict[str, dict]) -> str:
    names = list(runs)
    pair = both(runs)
    difference = compare(*pair) if pair else None
    heads = [shown(runs, name) for name in names]
    rows = [["", *heads, f"{shown(runs, 'mxfp8')} against {heads[0]}" if difference else ""]]

    def row(label: str, cell, note: str = "") -> None:
        rows.append([label, *(cell(runs[name]) for name in names), note])

    row("steps", lambda r: f"{r['steps']} of {r['settings']['steps']}")
    row(
        "validation loss",
        lambda r: f"{r['val_loss']:.4f}",
        f"gap {difference['gap_percent']:+.2f} %" if difference else "",
    )
    if any(len(run["seeds"]) > 1 for run in runs.values()):
        apart = " ".join(f"{gap:+.2f}" for gap in gaps_by_seed(*pair)) if pair else ""
        row("mean of", lambda r: f"{len(r['seeds'])} seeds", f"{apart} %" if pair else "")
    row(
        "tokens/s",
        lambda r: f"{r['tokens_per_second']:,.0f}",
        f"{difference['speedup']:.2f}x" if difference else "",
    )
    row(
        "step time, 10 to 90 %",
        lambda r: f"{r['step_seconds'][0]:.3f} to {r['step_seconds'][2]:.3f} s",
    )
    for label, key in (("peak memory", "peak"), ("kept for backward", "saved_for_backward")):
        change = ""
        if pair:
            change = f"{pair[1]['memory_mb'][key] / pair[0]['memory_mb'][key]:.2f}x"
        row(label, lambda r, key=key: f"{r['memory_mb'][key]:,.0f} MB", change)
    row("training time", lambda r: f"{r['train_seconds']:.0f} s")
    widths = [max(len(line[i]) for line in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in rows
    ]
    lines.insert(1, "-" * len(max(lines, key=len)))
    for what, layers in runs.get("mxfp8", {}).get("kernels", {}).items():
        where = "in" if what == "high precision" else "on"
        lines.append(f"{layers} linear layer{'s' if layers > 1 else ''} {where} {what}")
    return "\n".join(lines)


def _smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Bias-corrected exponential average."""
    total, out = 0.0, []
    for i, value in enumerate(values):
        total = weight * total + (1 - weight) * value
        out.append(total / (1 - weight ** (i + 1)))
    return out


def plot(runs: dict[str, dict], path: Path) -> None:
    """Training and validation loss of every run above, their difference in percent below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED}
    )
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(3, 1.4), layout="constrained"
    )
    for mode, run in runs.items():
        color = COLORS["mxfp8" if mode == "mxfp8" else "plain"]
        steps = range(1, len(run["losses"]) + 1)
        top.plot(steps, run["losses"], color=color, alpha=0.22, linewidth=0.8)
        # Dashed, because the curves usually lie on each other.
        style = (0, (3, 1.5)) if mode == "mxfp8" else "solid"
        top.plot(
            steps,
            _smooth(run["losses"]),
            color=color,
            linestyle=style,
            label=f"{shown(runs, mode)} training",
        )
        at, losses = zip(*run["val"], (run["steps"], run["val_loss"]), strict=True)
        top.plot(
            at, losses, color=color, linestyle="none", marker="o" if mode == "mxfp8" else "D",
            markersize=6, markerfacecolor="white", markeredgewidth=1.5,
            label=f"{shown(runs, mode)} validation",
        )  # fmt: skip
    top.set_ylabel("loss (nats a byte)")
    top.legend(frameon=False, ncols=2)
    top.set_title(_title(runs), loc="left", fontsize=11)
    _plot_difference(bottom, runs)
    bottom.set_xlabel("step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=BAND, linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot_difference(axes, runs: dict[str, dict]) -> None:
    axes.axhspan(-1, 1, color=BAND, alpha=0.6, linewidth=0)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    plain = next((run for mode, run in runs.items() if mode != "mxfp8"), None)
    axes.set_ylabel(f"{shown(runs, 'mxfp8')} over plain, %")
    if plain is None or "mxfp8" not in runs:
        axes.text(0.5, 0.5, "one run only", transform=axes.transAxes, ha="center", color=MUTED)
        return
    pairs = zip(_smooth(plain["losses"]), _smooth(runs["mxfp8"]["losses"]), strict=False)
    gap = [100 * (m - p) / p for p, m in pairs]
    axes.plot(range(1, len(gap) + 1), gap, color=INK, linewidth=1.4, label="training")
    theirs = dict(plain["val"])
    shared = [
        (at, 100 * (m - theirs[at]) / theirs[at]) for at, m in runs["mxfp8"]["val"] if at in theirs
    ]
    if both(runs):
        shared.append((plain["steps"], compare(plain, runs["mxfp8"])["gap_percent"]))
    if shared:
        axes.plot(*zip(*shared, strict=True), "o", color=COLORS["mxfp8"], label="validation")
    reach = max([1.5, *(1.1 * abs(g) for g in gap if math.isfinite(g))])
    axes.set_ylim(-reach, reach)
    axes.legend(frameon=False, ncols=2, loc="upper right")


def _title(runs: dict[str, dict]) -> str:
    run = next(iter(runs.values()))
    title = f"{run['model']}, {run['parameters'] / 1e6:.1f} M parameters"
    pair = both(runs)
    if pair:
        c = compare(*pair)
        title += f": validation gap {c['gap_percent']:+.2f} %"
        if all(map(is_steady, pair)):
            title += f", {c['speedup']:.2f}x tokens/s"
    return title


def write(runs: dict[str, dict], folder: Path) -> None:
    """run.json and loss.png for the runs there are."""
    pair = both(runs)
    record = {"machine": machine(), "runs": runs, "comparison": compare(*pair) if pair else None}
    (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(runs, folder / "loss.png")
