"""The validation loss of many runs: every recipe and bf16 over several seeds, on one GPU or on all
of them side by side, in as many sittings as it takes."""

import gc
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from gpt import data, report, stopping, train

from llama import train as llama
from llama.recipes import AGAIN

STOPPED, FAILED = 130, 1
GRACE = 40.0  # seconds before a limit in which runs write their checkpoints


def check_settings(path: Path, theirs: dict, ours: llama.LlamaSettings) -> None:
    """Raise ValueError where a file is of other settings."""
    there, here = (json.loads(json.dumps(one)) for one in (theirs, asdict(ours)))
    if differ := [k for k in sorted(here | there) if here.get(k) != there.get(k)]:
        rows = ", ".join(f"{k}: {there.get(k)} there, {here.get(k)} here" for k in differ)
        raise ValueError(f"{path} is of other settings ({rows}): take another --out")


class Job:
    """One run: a name, its settings, its files; of a plain one the recipes that its weights are
    tried `under`."""

    def __init__(
        self, name: str, settings: llama.LlamaSettings, out: Path, under: tuple[str, ...] = ()
    ) -> None:
        self.name, self.settings, self.under = name, settings, under
        base = f"{name}-seed{settings.seed}"
        self.record, self.checkpoint = out / f"{base}.json", out / f"{base}.pt"

    def done(self) -> dict | None:
        """Its record, if it is finished.

        Raises ValueError for one of other settings."""
        if not self.record.exists():
            return None
        found: dict = json.loads(self.record.read_text())
        check_settings(self.record, found["settings"], self.settings)
        return found

    def then(self, trainer: train.Trainer) -> dict:
        return {"same_weights": same_weights(trainer, self.under)} if self.under else {}


def jobs_of(
    settings: Callable[[str], llama.LlamaSettings], recipes: list[str], seeds: int, out: Path,
    begin: str = "",
) -> list[Job]:  # fmt: skip
    """Seed by seed, so that a study that is cut short has all recipes. `settings` are those of a
    mode, at the first seed; all runs begin with the checkpoint `begin`, if given."""
    plain = settings("mxfp8").dtype
    base = replace(settings(plain), eval_every=0, begin=begin)
    each = {plain: base}
    for name in recipes:
        each[name] = replace(base, mode=plain if name == AGAIN else "mxfp8", recipe=name)
    return [
        Job(
            name,
            replace(one, seed=base.seed + seed),
            out,
            tuple(r for r in recipes if r != AGAIN) if name == plain else (),
        )
        for seed in range(seeds)
        for name, one in each.items()
    ]


def begun(base: llama.LlamaSettings, steps: int, path: Path, stop: Callable[[int], bool]) -> bool:
    """Whether a plain run of so many steps has left its checkpoint at `path`. How long a run of
    random weights takes to learn to copy is chance; runs that begin here have learned it.

    Raises ValueError for a checkpoint of other settings."""
    settings = replace(base, steps=steps, eval_every=0, final_eval_batches=1)
    if path.exists():
        state = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        check_settings(path, state["settings"], settings)
        return True
    partial = path.with_suffix(".part")
    try:
        finished = train.run(
            settings, partial, resume=True, save_every=steps, should_stop=stop,
            make=llama.LlamaTrainer, quiet=True,
        )["finished"]  # fmt: skip
    finally:  # the workers have the GPUs
        gc.collect()
        torch.cuda.empty_cache()
    if finished:
        os.replace(partial, path)
    return bool(finished)


def same_weights(plain: train.Trainer, recipes: tuple[str, ...]) -> dict[str, float]:
    """The validation loss of a plain run's weights under each recipe: what quantizing costs,
    without what chance makes of a run."""
    losses = {}
    for name in recipes:
        settings = replace(plain.settings, mode="mxfp8", recipe=name)
        one = llama.LlamaTrainer(settings, plain.text)
        one.load_model_state(plain.model_state())
        losses[name] = one.evaluate(settings.final_eval_batches)
    return losses


def work(jobs: list[Job], take: Callable[[], int | None], stop: Callable[[], bool]) -> None:
    """Run jobs by their numbers until there are none, or it is time to stop."""
    text = data.load(jobs[0].settings.text)
    while not stop() and (number := take()) is not None:
        job = jobs[number]
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            record = train.run(
                job.settings, job.checkpoint, resume=True, save_every=train.WHEN_STOPPED,
                should_stop=lambda done: stop(), text=text, make=llama.LlamaTrainer, quiet=True,
                then=job.then,
            )  # fmt: skip
        except Exception:
            print(
                f"{job.record.stem} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True
            )
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        said = f"{job.record.stem}: {record['steps']} steps"
        if record["finished"]:
            partial = job.record.with_suffix(".partial")
            partial.write_text(json.dumps(record) + "\n")
            os.replace(partial, job.record)
            job.checkpoint.unlink(missing_ok=True)
            said += f", loss {record['val_loss']:.4f}, {record['tokens_per_second']:,.0f} tokens/s"
        print(said, flush=True)


def _worker(jobs: list[Job], numbers: Any, stopped: Any, deadline: float, threads: int) -> None:
    """A process for one GPU."""
    for signum in stopping.SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # the parent says when to stop
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def stop() -> bool:
        gone = parent is None or not parent.is_alive()
        return stopped.is_set() or gone or time.time() > deadline

    work(jobs, numbers.get, stop)


def run(jobs: list[Job], gpus: int, deadline: float) -> bool:
    """Run jobs on so many GPUs, or here where there is one place; whether it was told to stop."""
    context = multiprocessing.get_context("spawn")
    told = False
    stopped = context.Event()

    def tell(signum: int, frame: object) -> None:
        nonlocal told
        told = True
        stopped.set()

    for signum in stopping.SIGNALS:
        signal.signal(signum, tell)
    if gpus < 2:
        numbers = iter(range(len(jobs)))
        work(jobs, lambda: next(numbers, None), lambda: told or time.time() > deadline)
        return told
    queue = context.SimpleQueue()
    for number in (*range(len(jobs)), *[None] * gpus):
        queue.put(number)
    threads = max(1, (os.cpu_count() or 1) // gpus)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus)]
    workers = [
        context.Process(target=_worker, args=(jobs, queue, stopped, deadline, threads))
        for _ in range(gpus)
    ]
    for name, worker in zip(names, workers, strict=False):
        os.environ["CUDA_VISIBLE_DEVICES"] = name  # a process sees one
        worker.start()
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    for worker in workers:
        worker.join()
    return told


# ---------------------------------------------------------------------------------------- the table
def rows_of(records: dict[str, dict[int, dict]]) -> list[dict]:
    """One row a recipe: the mean and the standard deviation of its loss over seeds, and of its
    difference from the first row, the plain run, seed by seed, in percent; and the mean difference
    where the plain run's own weights run under the recipe."""
    plain = next(iter(records.values()))
    made = []
    for name, by_seed in records.items():
        if not by_seed:
            continue
        losses = [one["val_loss"] for one in by_seed.values()]
        pairs = [(one, plain[seed]) for seed, one in by_seed.items() if seed in plain]
        gaps = [report.compare(theirs, ours)["gap_percent"] for ours, theirs in pairs]
        fixed = [
            100 * (one["same_weights"][name] / one["val_loss"] - 1)
            for one in plain.values()
            if name in one.get("same_weights", {})
        ]
        speed = _median(by_seed, lambda r: r["tokens_per_second"])
        peak = _median(by_seed, lambda r: r["memory_mb"]["peak"])
        on_gpu = bool(plain) and by_seed[min(by_seed)]["settings"]["device"] != "cpu"
        made.append({
            "recipe": name, "seeds": sorted(by_seed), "loss": statistics.fmean(losses),
            "loss_std": _spread(losses), "gap_percent": statistics.fmean(gaps) if gaps else None,
            "gap_std": _spread(gaps), "same_weights": statistics.fmean(fixed) if fixed else None,
            "tokens_per_second": speed, "peak_mb": peak,
            "speedup": speed / _median(plain, lambda r: r["tokens_per_second"]) if plain else None,
            "memory": peak / _median(plain, lambda r: r["memory_mb"]["peak"]) if on_gpu else None,
            "kernels": next(iter(by_seed.values()))["kernels"],
        })  # fmt: skip
    return made


def _median(by_seed: dict[int, dict], of: Callable[[dict], float]) -> float:
    return statistics.median(of(one) for one in by_seed.values())


def _spread(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def table(rows: list[dict]) -> str:
    heads = (
        "recipe", "seeds", "validation loss", "std", "from plain", "std", "same weights",
        "tokens/s", "speed", "memory",
    )  # fmt: skip

    def shown(value: float | None, form: str, unit: str = "") -> str:
        return "-" if value is None else format(value, form) + unit

    cells = [
        (
            row["recipe"], str(len(row["seeds"])), f"{row['loss']:.4f}",
            shown(row["loss_std"], ".4f"), shown(row["gap_percent"], "+.2f", " %"),
            shown(row["gap_std"], ".2f"), shown(row["same_weights"], "+.3f", " %"),
            f"{row['tokens_per_second']:,.0f}", shown(row["speedup"], ".2f", "x"),
            shown(row["memory"], ".2f", "x"),
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in (heads, *cells)) for i in range(len(heads))]
    lines = [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *cells)
    ]
    slow = [
        f"{row['recipe']}: {layers} layers on {what}"
        for row in rows
        for what, layers in row["kernels"].items()
        if "reference" in what
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *slow])


def main(
    settings: Callable[[str], llama.LlamaSettings], recipes: list[str], seeds: int, out: Path,
    gpus: int, minutes: float | None, begin: int = 0,
) -> int:  # fmt: skip
    """The exit status; 130 where runs are left, which the same command goes on with. With `begin`
    all go on from as many plain steps, on batches of another seed than theirs."""
    start = time.time()
    deadline = start + 60 * minutes - GRACE if minutes is not None else float("inf")
    first = out / f"begin-{begin}.pt" if begin else None
    jobs = jobs_of(settings, recipes, seeds, out, str(first or ""))
    if first is not None:
        plain = settings(settings("mxfp8").dtype)
        plain = replace(plain, seed=plain.seed + seeds)
    try:
        left = [job for job in jobs if job.done() is None]
        if first and not begun(plain, begin, first, lambda done: time.time() > deadline):
            print("the plain steps are left; the same command goes on", file=sys.stderr)
            return STOPPED
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    left.sort(key=lambda job: not job.checkpoint.exists())  # what was begun comes first
    print(f"{len(left)} of {len(jobs)} runs to do", flush=True)
    told = run(left, min(gpus, len(left)), deadline) if left else False
    records: dict[str, dict[int, dict]] = {job.name: {} for job in jobs}
    for job in jobs:
        if (record := job.done()) is not None:
            records[job.name][job.settings.seed] = record
    rows = rows_of(records)
    undone = len(jobs) - sum(len(by_seed) for by_seed in records.values())
    made = {"machine": report.machine(), "settings": asdict(settings("mxfp8")), "rows": rows}
    (out / "study.json").write_text(json.dumps(made, indent=1) + "\n")
    if rows:
        print(f"\n{table(rows)}\n\nrecord: {out}/study.json")
    print(f"{time.time() - start:.0f} seconds")
    if not undone:
        return 0
    late = told or time.time() > deadline
    print(
        f"{undone} runs are left; the same command goes on" if late else f"{undone} runs failed",
        file=sys.stderr,
    )
    return STOPPED if late else FAILED
