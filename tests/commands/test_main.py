"""`python -m te_mx`: the tuner and explain."""

from __future__ import annotations

import json

import pytest
import torch
from fresh import python

import te_mx
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu.frozen import Frozen
from te_mx.commands import candidates, tune
from te_mx.commands.candidates import TOKENS, Shape, model_names, of_models
from te_mx.commands.main import main
from te_mx.dispatch import kernels as all_kernels
from te_mx.dispatch import registry
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.tuned import tables
from te_mx.dispatch.tuned.tables import DEFAULT

pytestmark = [
    pytest.mark.skipif(cpu.missing_reason() is not None, reason="no native module"),
    pytest.mark.usefixtures("untuned", "portable"),
]
SHAPE, CPU = "4x64x96", torch.device("cpu")


@pytest.fixture
def times(monkeypatch):
    """Microseconds by the name of a candidate, in place of a clock; `times.asked` has who was
    timed."""

    class Times(dict):
        asked: list = []  # noqa: RUF012

    given = Times(portable_stream=100.0, portable_f32=100.0)
    given.asked = []

    def clock(trials, sets, device, rounds):
        given.asked.append((list(trials), rounds))
        for name, trial in trials.items():
            trial.prepare()
            assert trial.call(0).shape == trial.call(sets - 1).shape
            assert te_mx.audit(trial.call.layers[0]).layers[0].fprop == name
        return {name: given[name] for name in trials}

    monkeypatch.setattr(tune, "microseconds", clock)
    monkeypatch.setattr(candidates, "cache_bytes", lambda device: 1 << 10)
    return given


def tuned(out, *more, shapes=SHAPE, formats="mxfp8_e4m3"):
    command = ["tune", "--shapes", shapes, "--fmt", formats, "--out", str(out), "--any-bits"]
    code = main([*command, *more])
    return code, {row.key.m: row for row in tables.read(out)}


def test_a_winner_is_written_followed_and_kept_by_resume(times, tmp_path, capsys):
    out = tmp_path / "t.csv"
    times["portable_f32"] = 80.0
    code, rows = tuned(out)
    assert code == 0 and rows[4].choice() == "portable_f32"
    assert (rows[4].us, rows[4].default, rows[4].default_us) == (80.0, "portable_stream", 100.0)
    said = capsys.readouterr()
    assert "default -> portable_f32, 100.0 -> 80.0 us (1.25x)" in said.out + said.err
    assert "1 problems timed, 1 rows" in said.out
    te_mx.use_tuned_table(out)
    assert te_mx.explain(m=64, n=4, k=96).kernel == "portable_f32"
    times["portable_f32"] = 200.0
    times.asked.clear()
    code, rows = tuned(out, "--resume", shapes="4x64x96,8x64x96")
    assert code == 0 and rows[4].use == "portable_f32" and rows[8].use == DEFAULT
    assert times.asked == [(["portable_stream", "portable_f32"], candidates.ROUNDS)]
    capsys.readouterr()
    code, rows = tuned(out)  # anew: what was timed before changes, what was not stays
    said = capsys.readouterr()
    assert rows[4].use == rows[8].use == DEFAULT
    assert "1 rows of the file chose otherwise" in said.out
    assert "portable_f32 -> default" in said.out


@pytest.mark.parametrize(
    ("us", "on_codes", "more", "use"),
    [
        (97.5, 97.5, [], DEFAULT),
        (97.0, 97.0, [], "portable_f32"),
        (80.0, 150.0, [], DEFAULT),
        (80.0, 150.0, ["--kept-only"], "portable_f32"),
    ],
    ids=["2.5 %", "3.1 %", "loses on plain codes", "which are not asked"],
)
def test_what_it_takes_to_win(times, tmp_path, monkeypatch, us, on_codes, more, use):
    """3 %, twice, and no loss where weights are codes alone."""
    out = tmp_path / "t.csv"
    times["portable_f32"] = us
    clock = tune.microseconds

    def by_turn(trials, sets, device, rounds):
        found = clock(trials, sets, device, rounds)
        if len(times.asked) == 3:  # all, then the best two for longer, then these on plain codes
            found["portable_f32"] = on_codes
        return found

    monkeypatch.setattr(tune, "microseconds", by_turn)
    assert tuned(out, *more)[1][4].use == use
    rounds = [one for _, one in times.asked]
    assert rounds == [7, 21, 7][: 1 if us == 97.5 else 2 if more else 3]


def test_wrong_and_hopeless_candidates_are_left_out(times, tmp_path, monkeypatch, capsys):
    out = tmp_path / "t.csv"
    times["portable_f32"] = 1000.0
    shapes = ",".join(f"{m}x64x96" for m in (1, 2, 3, 4, 5))
    assert tuned(out, shapes=shapes)[0] == 0
    assert [len(names) for names, _ in times.asked] == [2, 2, 2, 1, 1]
    times["portable_f32"] = 10.0
    (panel,) = (one for one in all_kernels.kernels("gemm") if one.name == "portable_f32")
    make_plan = panel.make_plan

    def wrong(problem):
        plan = make_plan(problem)

        def run(product):
            made = plan(product)
            product.out.mul_(1.1)
            return made

        return run

    monkeypatch.setattr(panel, "make_plan", wrong)
    monkeypatch.setattr(Frozen, "accepts", lambda self, problem: "calls native code itself")
    assert tuned(out)[1][4].use == DEFAULT
    said = capsys.readouterr()
    assert "portable_f32 is 0.1 off the default and left out" in said.out + said.err


def test_choices_change_no_bits_unless_asked_to(times, tmp_path, monkeypatch):
    """Kernels that add up in another order than the default at any number of rows that a row of the
    table serves stay out, however fast they are; the table says which it is."""
    times["portable_f32"] = 10.0
    out = tmp_path / "t.csv"
    command = ["tune", "--shapes", SHAPE, "--fmt", "mxfp8_e4m3", "--out", str(out)]
    assert main(command) == 0
    assert [row.choice() for row in tables.read(out)] == [DEFAULT]
    assert [names for names, _ in times.asked] == [["portable_stream"]]
    assert tables.remarks_of(out)[-1] == tune.SAME_BITS

    (panel,) = (one for one in all_kernels.kernels("gemm") if one.name == "portable_f32")
    alike = {4}  # numbers of rows at which it says what the default does

    def sums(problem):
        return "portable_stream" if problem.m in alike else "its own"

    monkeypatch.setattr(panel, "sums", sums)
    main(command)
    assert [row.choice() for row in tables.read(out)] == [DEFAULT]
    alike.add(3)  # which the row of 4 serves
    main(command)
    assert [row.choice() for row in tables.read(out)] == ["portable_f32"]
    monkeypatch.undo()
    monkeypatch.setattr(tune, "microseconds", lambda trials, *_: {n: times[n] for n in trials})

    assert main([*command, "--any-bits"]) == 0
    assert [row.choice() for row in tables.read(out)] == ["portable_f32"]
    assert tables.remarks_of(out)[-1] == tune.ANY_BITS
    main([*command[:2], "8x64x96", *command[3:], "--resume"])  # rows stay, and what they may do
    assert tables.remarks_of(out)[-1] == tune.ANY_BITS


def test_an_interrupted_run_keeps_what_is_done(times, tmp_path, monkeypatch, capsys):
    out, clock = tmp_path / "t.csv", tune.microseconds

    def stopped(trials, sets, device, rounds):
        if len(times.asked) == 1:
            raise KeyboardInterrupt
        return clock(trials, sets, device, rounds)

    monkeypatch.setattr(tune, "microseconds", stopped)
    code, rows = tuned(out, shapes="1x64x96,2x64x96")
    assert code == tune.INTERRUPTED and list(rows) == [1]
    assert "--resume goes on" in capsys.readouterr().err


def test_real_times_of_every_format(tmp_path, monkeypatch):
    """The clock itself, on sizes that take no time."""
    monkeypatch.setattr(candidates, "cache_bytes", lambda device: 1 << 12)
    monkeypatch.setitem(candidates._LEAST_SECONDS, "cpu", 1e-5)
    out = tmp_path / "t.csv"
    formats = "mxfp8_e4m3,mxfp4,mxfp4:mxfp4,fp8_e4m3_1x128:fp8_e4m3_128x128"
    made = ["tune", "--shapes", "2x64x128", "--fmt", formats, "--out", str(out)]
    assert main([*made, "--rounds", "1"]) == 0
    rows = tables.read(out)
    assert {(row.key.x, row.key.w) for row in rows} == {
        ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp4"), ("mxfp4", "mxfp4"),
        ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
    }  # fmt: skip
    assert all(row.us > 0 and row.default == "portable_stream" for row in rows)


def test_experts_are_tuned_by_tokens_and_top_k(tmp_path, monkeypatch, capsys):
    """Candidates of the product of routed rows; what won runs, and only at these sizes."""
    monkeypatch.setattr(candidates, "cache_bytes", lambda device: 1 << 10)
    given = {"cpu": 100.0, "cpu, few rows on portable_f32": 80.0}
    asked = []

    def clock(trials, sets, device, rounds):
        asked.append(sets)
        for trial in trials.values():
            trial.prepare()
            assert trial.call(0).shape == trial.call(sets - 1).shape == (8, 64)
            assert torch.equal(trial.call(0), trial.call(0))
        return {name: given[name] for name in trials}

    monkeypatch.setattr(tune, "microseconds", clock)
    out, mixture = tmp_path / "t.csv", ("--experts", "4", "--top-k", "2")
    code, rows = tuned(out, *mixture, formats="mxfp4")
    assert code == 0 and asked == [8, 8, 8]  # all, the best two for longer, these once more
    row = rows[4]
    assert row.key[1:] == ("moe_gemm", "mxfp8_e4m3", "mxfp4", 64, 96, 4, 4, 2)
    assert row.choice() == "cpu, few rows on portable_f32"
    assert "2 of 4 experts" in capsys.readouterr().out
    asked.clear()
    assert tuned(out, *mixture, "--resume", formats="mxfp4")[0] == 0 and not asked
    te_mx.use_tuned_table(out)
    capsys.readouterr()
    assert main(["explain", SHAPE, "--fmt", "mxfp8:mxfp4", *mixture]) == 0
    assert "configuration few rows on portable_f32" in capsys.readouterr().out


def test_sets_of_weights_lie_beyond_the_caches(monkeypatch):
    monkeypatch.setattr(candidates, "cache_bytes", lambda device: 32 << 20)
    device = torch.device("cpu")
    assert candidates.sets_for(16 << 20, device) == 4 and candidates.sets_for(1 << 30, device) == 2
    monkeypatch.undo()
    assert candidates.cache_bytes(device) >= 1 << 18


def test_models_have_the_sizes_of_their_projections(tmp_path):
    assert model_names() == ["llama3_70b", "llama3_8b", "moe_6144", "moe_6144_experts"]
    experts = of_models(["moe_6144_experts"], (1,))
    assert {one.weights for one in experts} == {(1536, 6144, 128, 4), (6144, 768, 128, 4)}
    sizes = {(s.n, s.k): s.names for s in of_models(["moe_6144"], TOKENS)}
    for k, n in ((6144, 2304), (2048, 6144), (6144, 1536), (1536, 6144)):
        assert any("tp4" in name for name in sizes[n, k])
    llama = of_models(["llama3_8b"], (1,))
    assert len(llama) == 16 and Shape(1, 6144, 4096, ("llama3_8b qkv tp1",)) in llama
    assert Shape(1, 4096, 1792, ("llama3_8b down tp8",)) in llama
    fields = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
              "num_key_value_heads": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    made = of_models([str(tmp_path / "config.json")], (2,))
    assert [one[:3] for one in made] == [(2, 128, 64), (2, 64, 64), (2, 192, 64), (2, 64, 96)]
    mixture = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(fields | mixture))
    made = of_models([str(tmp_path / "config.json")], (2,))
    assert [one.weights for one in made[2:]] == [(64, 64, 8, 2), (64, 32, 8, 2)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["tune", "--shapes", "1000x64x64"], "up to 512 tokens"),
        (["tune", "--model", "llama9"], "a model is one of llama3_70b"),
        (["tune", "--model", "llama3_8b", "--tokens", "0"], "tokens are numbers from 1"),
        (["tune", "--shapes", SHAPE, "--fmt", "mxfp5"], "mxfp5"),
        (["tune", "--shapes", SHAPE, "--device", "cuda:77"], "torch finds"),
        (["tune", "--shapes", SHAPE, "--device", "meta"], "no native kernel runs on meta"),
        (["tune", "--shapes", SHAPE, "--rounds", "0"], "--rounds must be at least 1"),
        (["tune", "--shapes", SHAPE, "--out", "pyproject.toml"], "is no tuned table"),
        (["tune", "--shapes", SHAPE, "--experts", "4"], "--experts and --top-k go together"),
        (["tune", "--shapes", SHAPE, "--experts", "4", "--top-k", "5"], "got 4 and 5"),
        (["tune", "--model", "llama3_8b", "--experts", "4"], "go with --shapes"),
        (["tune", "--shapes", SHAPE, "--tokens", "8"], "--tokens goes with --model"),
        (["explain", "big"], "a shape is MxNxK"),
        (["explain", SHAPE, "--experts", "4", "--top-k", "8"], "at most experts, got 8 of 4"),
        (["explain", SHAPE, "--top-k", "2"], "experts and top_k go together"),
        (
            ["explain", SHAPE, "--fmt", "nvfp4"],
            "no scale rule; name both formats, e.g. nvfp4:nvfp4",
        ),
    ],
)
def test_wrong_uses_are_said_in_one_line(arguments, why, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and why in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


FP8 = "fp8_e4m3_1x128"


@pytest.mark.parametrize("words", ["mxfp4", f"{FP8}:{FP8}", "nvfp4:nvfp4"])  # as tune has them
def test_explain_prints_the_choice(capsys, words):
    assert main(["explain", "4x64x96", "--fmt", words]) == 0
    said, recipe = capsys.readouterr().out, tune.recipe_of(words)
    assert said.strip() == str(te_mx.explain(m=64, n=4, k=96, recipe=recipe))
    assert said.endswith("not tuned: default\n")


AS_MODULE = (
    "import runpy, sys; sys.argv = ['te_mx', 'explain', '2x64x64']\n"
    "runpy.run_module('te_mx', run_name='__main__', alter_sys=True)"
)


def test_it_runs_as_a_module():
    made = python(AS_MODULE, TE_MX_CPU_ISA="portable")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("D[2, 64], k 64, TN, cpu at level portable: portable_stream")


def test_version_and_whole_sentences_of_help(capsys):
    for arguments, words in (
        (["--version"], f"te_mx {te_mx.__version__}"),
        (["--help"], "experts of a mixture, and write a table."),
        (["tune", "--help"], "experts of a mixture, and write a table."),
    ):
        with pytest.raises(SystemExit) as done:
            main(arguments)
        assert done.value.code == 0 and words in " ".join(capsys.readouterr().out.split())


def test_nobody_reads_on():
    """As behind `| head`: no traceback, and the status of a program that SIGPIPE ended."""
    closed = "import os; read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
    made = python(closed + AS_MODULE)
    assert made.returncode == 141 and made.stderr == ""


def test_a_layer_in_one_call_competes_with_its_steps(times, tmp_path, monkeypatch):
    """Of a layer that asks for an op that does it all, the steps are tuned first, and then the
    two are held against each other."""

    class OneCall(all_kernels.Kernel):
        op, name = "frozen_layer", "one_call"

        def accepts(self, problem):
            return None if problem.m < 8 else "takes fewer than 8 rows"

        def configurations(self, problem):
            return ("slowly",)

    monkeypatch.setitem(all_kernels._kernels, "frozen_layer", [OneCall()])
    forward = candidates.Contest.__call__
    ran = []

    def layer(self, i):
        m, n, k = self.shape[:3]
        spec = "mxfp8_e4m3@any"
        kernel = registry.find(Problem("frozen_layer", place_of(CPU), spec, spec, m, n, k))
        ran.append("steps" if kernel is None else f"{kernel.name} {kernel.configuration}".strip())
        return forward(self, i)

    monkeypatch.setattr(candidates.Contest, "__call__", layer)
    monkeypatch.setattr(
        tune, "microseconds",
        lambda trials, sets, device, rounds: {name: given[name] for name in trials},
    )  # fmt: skip
    out = tmp_path / "t.csv"
    given = {"portable_stream": 100.0, "portable_f32": 90.0, "one_call": 80.0,
             "one_call, slowly": 95.0, "steps": 60.0}  # fmt: skip
    command = ["tune", "--shapes", f"{SHAPE},8x64x96", "--fmt", "mxfp8_e4m3", "--any-bits"]
    main([*command, "--out", str(out)])
    rows = {(row.key.operation, row.key.m): row for row in tables.read(out)}
    assert {key: row.choice() for key, row in rows.items()} == {
        ("frozen_layer", 4): "steps", ("gemm", 4): "portable_f32", ("gemm", 8): "portable_f32",
    }  # fmt: skip
    assert rows["frozen_layer", 4].default == "one_call"
    assert {"one_call", "one_call slowly", "steps"} == set(ran)
    ran.clear()
    te_mx.use_tuned_table(out)
    spec = "mxfp8_e4m3@any"
    assert registry.find(Problem("frozen_layer", place_of(CPU), spec, spec, 4, 64, 96)) is None
