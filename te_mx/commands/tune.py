"""Time every kernel and configuration that takes a product of a frozen layer, and write a table."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import te_mx
from te_mx import formats
from te_mx.arguments import as_device
from te_mx.commands.candidates import Contest, Weights, make_weights
from te_mx.commands.shapes import (
    TOKENS,
    Shape,
    from_text,
    model_names,
    of_models,
    parse_tokens,
)
from te_mx.commands.timing import ROUNDS, microseconds
from te_mx.dispatch.problem import place_of
from te_mx.dispatch.tuned import table, tables
from te_mx.dispatch.tuned.table import DEFAULT, Key, Row
from te_mx.recipes.settings import Settings

GAIN = 1.03  # what a choice must win over the default
# A candidate that takes so many times the default's time, so often in a row, is tried no more.
HOPELESS, HOPELESS_IN_A_ROW = 4.0, 3
INTERRUPTED = 130
FORMATS = "mxfp8_e4m3,mxfp4"


def add_options(p: argparse.ArgumentParser) -> None:
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--shapes", metavar="MxNxK,..", help="tokens x out features x in features")
    what.add_argument(
        "--model", action="append", metavar="MODEL",
        help=f"{', '.join(model_names())}, a file like theirs, or the config.json of a "
        "Llama-shaped model; may be given several times",
    )  # fmt: skip
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    p.add_argument(
        "--formats", default=FORMATS, metavar="W,X:W,..",
        help=f"of weights, or of inputs and weights; inputs are MXFP8 otherwise ({FORMATS})",
    )  # fmt: skip
    p.add_argument(
        "--tokens", default=",".join(map(str, TOKENS)), help="M of each layer of a model"
    )
    p.add_argument(
        "--split-k", action="store_true", help="as recipes with split_k=True, which may cut K"
    )
    p.add_argument("--out", type=Path, help="(default: te_mx_<device>.csv)")
    p.add_argument("--resume", action="store_true", help="leave out what --out has already")
    p.add_argument("--rounds", type=int, default=ROUNDS, help="of timing; the median counts")


def run(args: argparse.Namespace) -> int:
    device = _device(args.device)
    name = tables.device_name(place_of(device))
    if not name:
        raise ValueError(
            f"nothing to tune: no native kernel runs on {device}; te_mx doctor says why"
        )
    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {args.rounds}")
    tokens = parse_tokens(args.tokens)
    shapes = from_text(args.shapes) if args.shapes else of_models(args.model, tokens)
    recipes = [_settings(word, args.split_k) for word in args.formats.split(",")]
    out = args.out or Path(f"te_mx_{name}.csv")
    session = Session(device, out, args.resume, args.rounds)
    with _bar(len(shapes) * len(recipes)) as bar:
        try:
            for settings in recipes:
                for shape, weights in _with_weights(shapes, settings, device, session):
                    bar.set_postfix_str(f"{settings.w} {'x'.join(map(str, shape[:3]))}")
                    if weights is not None:
                        session.tune(shape, settings, weights, bar.write)
                    bar.update()
        except KeyboardInterrupt:
            bar.close()
            print(f"stopped; {out} has what is done, --resume goes on", file=sys.stderr)
            return INTERRUPTED
    print(session.summary())
    return 0


class Session:
    """A run of the tuner: the table so far, and what of it changed."""

    def __init__(self, device: torch.device, out: Path, resume: bool, rounds: int) -> None:
        self.device, self.out, self.resume, self.rounds = device, out, resume, rounds
        old = table.read(out) if out.exists() else []
        self.rows: dict[Key, Row] = {row.key: row for row in old}
        self.old = dict(self.rows)
        self.done: list[Key] = []
        self.slow: Counter[tuple[str, str]] = Counter()  # by the format of weights and the name
        self.remarks = [
            f"measured choices of te_mx {te_mx.__version__} on {_full_name(device)}, torch "
            f"{torch.__version__}, {torch.get_num_threads()} CPU threads, "
            f"{datetime.now(timezone.utc):%Y-%m-%d}",
            "us of a frozen layer, its bf16 input quantized in the call, weights out of the caches",
        ]

    def has(self, key: Key) -> bool:
        """Whether there is nothing to do for this row."""
        return self.resume and key in self.old

    def tune(
        self, shape: Shape, settings: Settings, weights: Weights, say: Callable[[str], None]
    ) -> None:
        """Time one problem and write the table, at once."""
        contest = Contest(shape, settings, weights.kept, self.device)
        if self.has(contest.key):
            return
        w, usual = settings.w, contest.usual
        contest.candidates = [
            one for one in contest.candidates
            if one is usual or self.slow[w, one.name] < HOPELESS_IN_A_ROW
        ]  # fmt: skip
        contest.check(say)
        row = self._winner(contest, Contest(shape, settings, weights.plain, self.device))
        before = self.rows.get(row.key)
        self.rows[row.key] = row
        self.done.append(row.key)
        table.write(self.out, self.rows.values(), self.remarks)
        was = DEFAULT if before is None else before.choice()
        if was != row.choice():
            say(f"{_words(row.key)}: {was} -> {row.choice()}, {_times(row)}")

    def _winner(self, contest: Contest, plain: Contest) -> Row:
        """The candidate that beats the default by 3 %, twice, and does not lose by as much on plain
        codes; or the default."""
        usual = contest.usual
        times = self._times(contest, contest.candidates, self.rounds)
        for name, us in times.items():
            slow = us > HOPELESS * times[usual.name]
            self.slow[contest.key.w, name] = (self.slow[contest.key.w, name] + 1) * slow
        best = min(contest.candidates, key=lambda one: times[one.name])
        final = {usual.name: times[usual.name]}
        if best is not usual and times[usual.name] >= GAIN * times[best.name]:
            final = self._times(contest, [usual, best], 3 * self.rounds)
            rivals = [one for one in plain.candidates if one.name in (usual.name, best.name)]
            fair = True
            if len(rivals) == 2:
                on_codes = self._times(plain, rivals, self.rounds)
                fair = on_codes[best.name] <= GAIN * on_codes[usual.name]
            if fair and final[usual.name] >= GAIN * final[best.name]:
                return Row(
                    contest.key, best.kernel.name, best.configuration, final[best.name],
                    usual.kernel.name, final[usual.name],
                )  # fmt: skip
        us = final[usual.name]
        return Row(contest.key, DEFAULT, "", us, usual.kernel.name, us)

    def _times(self, contest: Contest, candidates: list[Any], rounds: int) -> dict[str, float]:
        calls = {one.name: contest.call(one) for one in candidates}
        return microseconds(calls, len(contest.weights), self.device, rounds)

    def summary(self) -> str:
        """What this run did, in a few lines."""
        rows = [self.rows[key] for key in self.done]
        won = [row for row in rows if row.use != DEFAULT]
        lines = [f"{len(rows)} problems timed, {len(self.rows)} rows in {self.out}"]
        if won:
            mean = math.exp(sum(math.log(row.gain) for row in won) / len(won))
            lines.append(f"{len(won)} with another choice than the default, {mean:.2f}x on average")
        changed = [key for key in self.done if key in self.old and self._differs(key)]
        lines.append(f"{len(changed)} rows of the file chose otherwise before")
        lines += [
            f"  {_words(key)}: {self.old[key].choice()} -> {self.rows[key].choice()}"
            for key in changed
        ]
        lines.append(f"use it: TE_MX_TUNED={self.out} or te_mx.use_tuned_table({str(self.out)!r})")
        return "\n".join(lines)

    def _differs(self, key: Key) -> bool:
        return self.old[key].choice() != self.rows[key].choice()


def _with_weights(
    shapes: list[Shape], settings: Settings, device: torch.device, session: Session
) -> Iterator[tuple[Shape, Weights | None]]:
    """Each shape with weights of its size, made once for shapes of one size, or None where the
    table has it."""
    sizes = dict.fromkeys((shape.n, shape.k) for shape in shapes)
    name = tables.device_name(place_of(device))
    for size in sizes:
        weights = None
        for shape in shapes:
            if (shape.n, shape.k) == size:
                key = Key(name, "gemm", settings.x, settings.w, *size, shape.m)
                if weights is None and not session.has(key):
                    weights = make_weights(*size, settings, device)
                yield shape, None if session.has(key) else weights


def _settings(word: str, split_k: bool) -> Settings:
    """Those of a frozen layer: of "mxfp4" as weights, or of "mxfp4:mxfp4" as inputs and weights."""
    x, _, w = word.strip().rpartition(":")
    x = x or "mxfp8_e4m3"
    rule = "rceil" if formats.get(x).scaling.takes("rceil") else "pow2"
    return te_mx.recipe.BlockScaling(x=x, w=w, g=x, scale_rule=rule, split_k=split_k).settings


def _device(text: str) -> torch.device:
    device = as_device("--device", text)
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device {text}: torch finds {torch.cuda.device_count()} GPUs here")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _full_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return tables.device_name(place_of(device))


def _words(key: Key) -> str:
    return f"{key.operation} {key.x} x {key.w}, n {key.n}, k {key.k}, m {key.m}"


def _times(row: Row) -> str:
    if row.use == DEFAULT:
        return f"{row.us:.1f} us"
    return f"{row.default_us:.1f} -> {row.us:.1f} us ({row.gain:.2f}x)"


def _bar(total: int) -> Any:
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError as error:
        raise RuntimeError("the progress bar needs tqdm: pip install tqdm") from error
    return tqdm(total=total, unit="problem", smoothing=0.1)
