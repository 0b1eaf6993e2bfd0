"""Time every kernel and configuration that takes a product of a frozen layer or of the experts of a
mixture, and write a table."""

import argparse
import gc
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
from te_mx.commands.candidates import (
    ROUNDS,
    TOKENS,
    Candidate,
    Contest,
    Experts,
    Layers,
    Shape,
    candidates_of,
    from_text,
    leave,
    microseconds,
    model_names,
    of_models,
    parse_tokens,
)
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.tuned import tables
from te_mx.dispatch.tuned.tables import DEFAULT, STEPS, Key, Row, key_of
from te_mx.recipe import BlockScaling
from te_mx.runtime.arguments import as_device

GAIN = 1.03  # what a choice must win over the default
# A candidate that takes so many times the default's time, so often in a row, is tried no more.
HOPELESS, HOPELESS_IN_A_ROW = 4.0, 3
INTERRUPTED = 130
FORMATS = "mxfp8_e4m3,mxfp4"
# What a table says of the bits of results.
SAME_BITS = "no row changes a bit of a result: every choice adds up as the default does"
ANY_BITS = (
    "rows may change the last bits of results (--any-bits): choices add up in other orders than "
    "the default, and a token's bits depend on how many others there are"
)


def add_options(p: argparse.ArgumentParser) -> None:
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--shapes", metavar="MxNxK,..", help="tokens x out features x in features")
    what.add_argument(
        "--model", action="append", metavar="MODEL",
        help=f"{', '.join(model_names())}, a file like theirs, or the config.json of a "
        "Llama-shaped model; may be given several times",
    )  # fmt: skip
    p.add_argument(
        "--experts", type=int, default=0,
        help="take --shapes for those of te_mx.moe.grouped_gemm with so many experts",
    )  # fmt: skip
    p.add_argument(
        "--top-k", type=int, default=0, help="how many experts a token has, with --experts"
    )
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, .. (default: cpu)")
    p.add_argument(
        "--fmt", default=FORMATS, metavar="W,X:W,..",
        help="formats of weights, or of inputs and weights; inputs are MXFP8 otherwise (default: "
        f"{FORMATS})",
    )  # fmt: skip
    default = ",".join(map(str, TOKENS))
    p.add_argument(
        "--tokens", metavar="M,..", help=f"tokens of each layer of --model (default: {default})"
    )
    p.add_argument(
        "--split-k", action="store_true", help="tune for recipes with split_k=True, which may cut K"
    )
    p.add_argument(
        "--any-bits", action="store_true",
        help="let choices win that add up in another order than the default does: a token's bits "
        "then depend on how many others there are",
    )  # fmt: skip
    p.add_argument("--out", type=Path, help="the table to write (default: te_mx_<device>.csv)")
    p.add_argument("--resume", action="store_true", help="leave out what --out has already")
    p.add_argument(
        "--kept-only", action="store_true",
        help="let choices win that lose on plain codes, which weights without a master have",
    )  # fmt: skip
    p.add_argument(
        "--rounds", type=int, default=ROUNDS,
        help="how often each candidate is timed; the median counts (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    device = _device(args.device)
    name = tables.device_name(place_of(device))
    if not name:
        raise ValueError(
            f"nothing to tune: no native kernel runs on {device}; te_mx doctor says why"
        )
    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {args.rounds}")
    if args.tokens is not None and args.shapes:
        raise ValueError("--tokens goes with --model: each of --shapes names its own")
    tokens = TOKENS if args.tokens is None else parse_tokens(args.tokens)
    if args.model and (args.experts or args.top_k):
        raise ValueError("--experts and --top-k go with --shapes: a model says how many it has")
    shapes = (
        from_text(args.shapes, args.experts, args.top_k)
        if args.shapes
        else of_models(args.model, tokens)
    )
    recipes = [recipe_of(word, args.split_k) for word in args.fmt.split(",")]
    out = args.out or Path(f"te_mx_{name}.csv")
    session = Session(device, out, args.resume, args.rounds, args.kept_only, args.any_bits)
    gc.collect()
    gc.freeze()  # collections before each capture look at what came since
    with _bar(len(shapes) * len(recipes)) as bar:
        try:
            for recipe in recipes:
                with torch.no_grad(), te_mx.autocast(recipe=recipe):
                    for shape, layers in _with_layers(shapes, recipe, device, session):
                        bar.set_postfix_str(f"{recipe.w} {shape}")
                        if layers is not None:
                            session.tune(shape, layers, bar.write)
                        bar.update()
        except KeyboardInterrupt:
            bar.close()
            done = f"{out} has what is done, --resume goes on"
            print(f"stopped; {done if out.exists() else 'nothing is done'}", file=sys.stderr)
            return INTERRUPTED
        finally:
            gc.unfreeze()
            leave()
    print(session.summary())
    return 0


class Session:
    """A run of the tuner: the table so far, and what of it changed."""

    def __init__(
        self, device: torch.device, out: Path, resume: bool = False, rounds: int = ROUNDS,
        kept_only: bool = False, any_bits: bool = False,
    ) -> None:  # fmt: skip
        self.device, self.out, self.resume, self.rounds = device, out, resume, rounds
        self.kept_only, self.any_bits = kept_only, any_bits
        old = tables.read(out) if out.exists() else []
        self.rows: dict[Key, Row] = {row.key: row for row in old}
        self.old = dict(self.rows)
        self.done: list[Key] = []
        self.slow: Counter[tuple[str, str]] = Counter()  # by the format of weights and the name
        cuda = device.type == "cuda"
        name = torch.cuda.get_device_name if cuda else lambda d: tables.device_name(place_of(d))
        self.remarks = [
            f"measured choices of te_mx {te_mx.__version__} on {name(device)}, torch "
            f"{torch.__version__}, {torch.get_num_threads()} CPU threads, "
            f"{datetime.now(timezone.utc):%Y-%m-%d}",
            "us of a layer or of all experts, bf16 inputs quantized in the call, weights out "
            "of the caches",
            ANY_BITS if any_bits or (old and ANY_BITS in tables.remarks_of(out)) else SAME_BITS,
        ]

    def has(self, key: Key) -> bool:
        """Whether there is nothing to do for this row."""
        return self.resume and key in self.old

    def tune(self, shape: Shape, layers: Layers | Experts, say: Callable[[str], None]) -> None:
        """Time one size and write the table, at once."""
        contest = Contest(shape, layers)
        problems = contest.problems()
        rows: dict[Key, Row] = {}
        # The last one first: those before it are left to their steps meanwhile.
        for at in range(len(problems) - 1, -1, -1):
            before = [Candidate(STEPS).row(key_of(problem)) for problem in problems[:at]]
            around = [*before, *rows.values()]
            row = self._winner(contest, layers, problems[at], around, say)
            rows[row.key] = row
        for key, row in rows.items():
            was = self.rows[key].choice() if key in self.rows else DEFAULT
            self.rows[key] = row
            self.done.append(key)
            if was != row.choice():
                say(f"{_words(key)}: {was} -> {row.choice()}, {_times(row)}")
        tables.write(self.out, self.rows.values(), self.remarks)

    def _winner(
        self, contest: Contest, layers: Layers | Experts, problem: Problem, around: list[Row],
        say: Callable[[str], None],
    ) -> Row:  # fmt: skip
        """The candidate that beats the default by 3 %, twice, and does not lose by as much on plain
        codes; or the default."""
        key = key_of(problem)

        def rows(one: Candidate) -> "list[Row]":
            return [*around, one.row(key)]

        def times(of: Contest, candidates: "list[Candidate]", rounds: int) -> "dict[str, float]":
            trials = {one.name: of.trial(rows(one)) for one in candidates}
            return microseconds(trials, len(of.layers), self.device, rounds)

        usual, *others = candidates_of(problem, self.any_bits)
        others = [one for one in others if self.slow[key.w, one.name] < HOPELESS_IN_A_ROW]
        wrong = contest.wrong([usual, *others], rows)
        for name, error in wrong.items():
            say(f"{name} is {error:.2g} off the default and left out: please report it")
        others = [one for one in others if one.name not in wrong]
        first = times(contest, [usual, *others], self.rounds)
        for name, us in first.items():
            slow = us > HOPELESS * first[usual.name]
            self.slow[key.w, name] = (self.slow[key.w, name] + 1) * slow
        us = first[usual.name]
        best = min(others, key=lambda one: first[one.name], default=usual)
        if us >= GAIN * first[best.name] and best is not usual:
            final = times(contest, [usual, best], 3 * self.rounds)
            us, fair = final[usual.name], True
            if not self.kept_only:
                plain = Contest(contest.shape, layers, plain=True)
                on_codes = times(plain, [usual, best], self.rounds)
                fair = on_codes[best.name] <= GAIN * on_codes[usual.name]
            if fair and us >= GAIN * final[best.name]:
                return Row(key, best.use, best.configuration, final[best.name], usual.use, us)
        return Row(key, DEFAULT, "", us, usual.use, us)

    def summary(self) -> str:
        """What this run did, in a few lines."""
        rows = [self.rows[key] for key in self.done]
        won = [row for row in rows if row.use != DEFAULT]
        lines = [f"{len(rows)} problems timed, {len(self.rows)} rows in {self.out}"]
        if won:
            mean = math.exp(sum(math.log(row.gain) for row in won) / len(won))
            lines.append(f"{len(won)} with another choice than the default, {mean:.2f}x on average")
        choices = {
            k: (self.old[k].choice(), self.rows[k].choice()) for k in self.done if k in self.old
        }
        changed = [f"  {_words(k)}: {a} -> {b}" for k, (a, b) in choices.items() if a != b]
        lines += [f"{len(changed)} rows of the file chose otherwise before", *changed]
        lines.append(f"use it: TE_MX_TUNED={self.out} or te_mx.use_tuned_table({str(self.out)!r})")
        return "\n".join(lines)


def _with_layers(
    shapes: list[Shape], recipe: BlockScaling, device: torch.device, session: Session
) -> Iterator[tuple[Shape, Layers | Experts | None]]:
    """Each shape with layers or experts of its size, made once; None where the table has it."""
    name = tables.device_name(place_of(device))
    for size in dict.fromkeys(shape.weights for shape in shapes):
        layers: Layers | Experts | None = None
        n, k, *mixture = size
        # The op that every layer may run as.
        op = "moe_gemm" if mixture[0] else "gemm"
        for shape in shapes:
            if shape.weights == size:
                has = session.has(Key(name, op, recipe.x, recipe.w, n, k, shape.m, *mixture))
                if layers is None and not has:
                    make = Experts if mixture[0] else Layers
                    layers = make(shape, recipe, device)
                yield shape, None if has else layers


def recipe_of(word: str, split_k: bool = False) -> BlockScaling:
    """That of a frozen layer: of "mxfp4" as weights, or of "mxfp4:mxfp4" as inputs and weights."""
    x, _, w = word.strip().rpartition(":")
    x, w = formats.get(x or "mxfp8_e4m3").name, formats.get(w).name
    known = formats.get(w).scaling
    rules = [rule for rule in formats.get(x).scaling.rules if known.knows(rule)]
    if not rules:
        raise ValueError(
            f"no recipe has inputs in {x} and weights in {w}, which share no scale rule; name both "
            f"formats, e.g. {w}:{w}"
        )
    return BlockScaling(x=x, w=w, g=x, scale_rule=rules[0], split_k=split_k)


def _device(text: str) -> torch.device:
    device = as_device("--device", text)
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device {text}: torch finds {torch.cuda.device_count()} GPUs here")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _words(key: Key) -> str:
    mixture = f", {key.top_k} of {key.experts} experts" if key.experts else ""
    return f"{key.operation} {key.x} x {key.w}, n {key.n}, k {key.k}, m {key.m}{mixture}"


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
