"""What a reader of examples/generate.py sees: one table, one plot, one JSON."""

import json
from pathlib import Path

from gpt.report import BAND, INK, MUTED, machine

DECODE, PREFILL = "tokens_per_second", "prefill_tokens_per_second"
COLORS = {"bf16": "#7b8794", "mxfp8": "#2f6fb0", "mxfp4": "#d9622b"}


def speedup(runs: dict[str, dict], mode: str, size: str = "", what: str = DECODE) -> float | None:
    """How many times faster than bf16, at the first size if none is given; None where bf16 did not
    run."""
    if "bf16" not in runs:
        return None
    ours, theirs = runs[mode][what], runs["bf16"][what]
    size = size or next(iter(ours))
    return ours[size] / theirs[size]


def table(runs: dict[str, dict]) -> str:
    rows = [["", *runs]]

    def row(label: str, cell) -> None:
        rows.append([label, *(cell(mode, run) for mode, run in runs.items())])

    first = next(iter(runs.values()))
    for what, label in ((DECODE, "batch {}, tokens/s"), (PREFILL, "prompt of {}, tokens/s")):
        for size in first[what]:
            row(label.format(size), lambda mode, run, w=what, s=size: f"{run[w][s]:,.1f}")
            if "bf16" in runs:
                row(
                    "  against bf16",
                    lambda mode, run, w=what, s=size: f"{speedup(runs, mode, s, w):.2f}x",
                )
    if "bf16" in runs:
        row("chooses bf16's token", lambda mode, run: f"{100 * run['agreement']:.1f} %")
        row("alike until token", lambda mode, run: f"{run['alike_until']:.0f}")
    row("memory in use", lambda mode, run: f"{run['memory_mb']['in_use']:,.0f} MB")
    whole = runs["bf16"]["memory_mb"]["in_use"] if "bf16" in runs else 0.0
    if whole > 0:  # what a tiny model takes may not show in a process
        row("  against bf16", lambda mode, run: f"{run['memory_mb']['in_use'] / whole:.2f}x")
    row("peak memory", lambda mode, run: f"{run['memory_mb']['peak']:,.0f} MB")
    widths = [max(len(line[i]) for line in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in rows
    ]
    lines.insert(1, "-" * len(max(lines, key=len)))
    for mode, run in runs.items():
        for what, layers in run["kernels"].items():
            lines.append(f"{mode}: {layers} linear layer{'s' if layers > 1 else ''} on {what}")
    return "\n".join(lines)


def plot(runs: dict[str, dict], path: Path) -> None:
    """Tokens a second, and the memory that is in use."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED}
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    bars = {
        left: ("tokens/s", [next(iter(run[DECODE].values())) for run in runs.values()]),
        right: ("memory in use, MB", [run["memory_mb"]["in_use"] for run in runs.values()]),
    }
    for axes, (label, values) in bars.items():
        drawn = axes.bar(list(runs), values, color=[COLORS[mode] for mode in runs], width=0.6)
        axes.bar_label(drawn, fmt="{:,.0f}", padding=2)
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=BAND, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(y=0.12)
    figure.suptitle(_title(runs), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _title(runs: dict[str, dict]) -> str:
    run = next(iter(runs.values()))
    chosen, device = run["settings"], machine()
    where = device["gpu"] if chosen["device"].startswith("cuda") else device["cpu"]
    size = f"{run['parameters'] / 1e6:,.3g} M parameters"
    return f"{chosen['config']}, {size}, batch {chosen['batches'][0]}, greedy decode on {where}"


def write(runs: dict[str, dict], folder: Path) -> None:
    """run.json and generate.png for the runs there are."""
    record = {
        "machine": machine(),
        "runs": runs,
        "speedup": {mode: speedup(runs, mode) for mode in runs},
    }
    (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(runs, folder / "generate.png")
