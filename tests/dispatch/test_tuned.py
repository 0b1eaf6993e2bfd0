"""Tables of measured choices: what kernels accept is the truth, then the table, then the rest."""

from __future__ import annotations

import os

import as_on_hopper
import fake_sm90
import pytest
import torch

import te_mx
from te_mx import _ops as ops
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu import grouped as cpu_moe
from te_mx.backends.device_names import short_name
from te_mx.dispatch import kernels as all_kernels
from te_mx.dispatch import registry
from te_mx.dispatch.problem import Place, Problem, place_of
from te_mx.dispatch.tuned import tables
from te_mx.dispatch.tuned.tables import DEFAULT, Key, Row
from te_mx.runtime.kernel_log import LAST_RUN

CPU = torch.device("cpu")
N, K = 96, 128
needs_native = pytest.mark.skipif(cpu.missing_reason() is not None, reason="no native module")
pytestmark = [needs_native, pytest.mark.usefixtures("untuned")]


def row(m=4, use="portable_f32", how="", device="cpu_portable", n=N, k=K, op="gemm"):
    key = Key(device, op, "mxfp8_e4m3", "mxfp8_e4m3", n, k, m)
    return Row(key, use, how, 10.0, "portable_stream", 20.0)


def written(path, *rows):
    tables.write(path, rows, ["of a test"])
    return path


def said(m, n=N, k=K):
    return te_mx.explain(m=n, n=m, k=k)


def ran(m, n=N, k=K):
    """The kernel that a product of m rows runs on."""
    a, b = te_mx.quantize(torch.randn(n, k)), te_mx.quantize(torch.randn(m, k))
    ops.gemm_2d(b.operand("rowwise"), a.operand("rowwise"), out_dtype=torch.float32, tag=3)
    return LAST_RUN[3]


def test_a_table_is_followed_and_said(portable, tmp_path):
    assert ran(4) == "portable_stream" and said(4).tuned == "not tuned: default"
    assert te_mx.use_tuned_table(written(tmp_path / "mine.csv", row(4))) == 1
    assert ran(4) == said(4).kernel == "portable_f32"
    assert said(4).tuned == (
        "tuned table mine.csv: kernel portable_f32; its bits are not the default's"
    )
    assert dict(said(4).declined)["portable_stream"] == (
        "takes it too; portable_f32 is the choice of a table"
    )
    assert "tuned table mine.csv" in str(said(4))
    # The row of 4 rows serves 3 as well; no row serves 2, 5, other sizes or other formats.
    assert ran(3) == said(3).kernel == "portable_f32"
    assert "measured at 4 rows" in said(3).tuned
    for sizes in ((2, N, K), (5, N, K), (4, N + 1, K), (4, N, K + 32)):
        assert ran(*sizes) == said(*sizes).kernel == "portable_stream"
    recipe = te_mx.recipe.BlockScaling(x="mxfp8_e5m2", w="mxfp8_e4m3", g="mxfp8_e5m2")
    assert te_mx.explain(m=N, n=4, k=K, recipe=recipe).kernel == "portable_stream"
    te_mx.use_tuned_table(None)
    assert ran(4) == "portable_stream" and said(4).tuned == "not tuned: default"


def test_results_are_those_of_the_kernel_that_the_table_names(portable, tmp_path):
    x, w = torch.randn(4, K), torch.nn.Linear(K, N)
    layer = te_mx.Linear(K, N)
    layer.load_state_dict(w.state_dict())
    te_mx.freeze_weights(layer)
    with torch.no_grad(), te_mx.autocast():
        before = layer(x)
        te_mx.use_tuned_table(written(tmp_path / "mine.csv", row(4)))
        after = layer(x)
    assert te_mx.audit(layer).layers[0].fprop == "portable_f32"
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    ("use", "how", "why"),
    [
        ("amx_stream", "", "needs the CPU level amx"),
        ("sm90_adaptive", "parts 2", "runs on"),
        ("no_such_kernel", "", "which this te_mx has not"),
        ("portable_f32", "tile 1x1", "has no configuration 'tile 1x1'"),
        (DEFAULT, "", "the default, which nothing beat"),
    ],
)
def test_what_kernels_decline_is_ignored_and_said(portable, tmp_path, use, how, why):
    te_mx.use_tuned_table(written(tmp_path / "mine.csv", row(4, use, how)))
    assert ran(4) == said(4).kernel == "portable_stream"
    assert why in said(4).tuned and said(4).tuned.startswith("tuned table mine.csv")


def test_the_last_table_wins_and_the_shipped_one_comes_last(portable, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "shipped")
    written(tmp_path / "shipped" / "cpu_portable.csv", row(1), row(2), row(4), row(8))
    named = [
        written(tmp_path / "a.csv", row(2, DEFAULT), row(4, DEFAULT), row(8, DEFAULT)),
        written(tmp_path / "b.csv", row(8)),
    ]
    monkeypatch.setenv(tables.VARIABLE, os.pathsep.join(map(str, named)))
    te_mx.use_tuned_table(None)
    te_mx.use_tuned_table(written(tmp_path / "added.csv", row(4)))
    by = {m: said(m).tuned.split(":")[0].removeprefix("tuned table ") for m in (1, 2, 4, 8)}
    assert by == {1: "cpu_portable.csv", 2: "a.csv", 4: "added.csv", 8: "a.csv"}
    assert [ran(m) for m in (1, 2, 4, 8)] == [said(m).kernel for m in (1, 2, 4, 8)]
    monkeypatch.setenv(tables.VARIABLE, "off")
    te_mx.use_tuned_table(None)
    assert said(1).tuned == "not tuned: default"


def test_rows_of_other_devices_are_for_them(portable, tmp_path):
    te_mx.use_tuned_table(written(tmp_path / "mine.csv", row(4, device="h200")))
    assert ran(4) == "portable_stream" and said(4).tuned == "not tuned: default"
    assert tables.device_name(place_of(CPU)) == "cpu_portable"
    assert [short_name(f"NVIDIA {name}") for name in ("H200", "H100 80GB HBM3")] == [
        "h200", "h100_80gb_hbm3",
    ]  # fmt: skip


def test_large_problems_and_what_weights_are_packed_for_do_not_follow_rows(portable, tmp_path):
    """Weights that stand still are packed for a large problem, of which no table says anything."""
    rows = [row(512, "portable_f32", n=1024, k=1024)]
    te_mx.use_tuned_table(written(tmp_path / "mine.csv", *rows))
    assert said(512, 1024, 1024).tuned.startswith("tuned table")
    assert said(513, 1024, 1024).tuned == "not tuned: default"


def test_a_layer_in_one_call_runs_in_steps_where_they_are_faster(portable, tmp_path):
    """Of an op that need not have a kernel, a row may say that the steps of others are faster; one
    that must have a kernel knows no steps."""
    layer, x = te_mx.Linear(K, N), torch.randn(4, K)
    problem = Problem("linear_infer", place_of(CPU), "mxfp8_e4m3@any", "mxfp8_e4m3@any", 4, N, K)
    with torch.no_grad(), te_mx.autocast():
        before = layer(x)
        assert registry.find(problem) is not None
        rows = row(4, tables.STEPS, op="linear_infer"), row(4, tables.STEPS)
        te_mx.use_tuned_table(written(tmp_path / "mine.csv", *rows))
        assert registry.find(problem) is None
        assert registry.find(problem._replace(m=5)) is not None
        torch.testing.assert_close(layer(x), before)
    assert said(4).kernel == "portable_stream" and said(4).tuned.endswith("one after the other")


def test_rows_of_experts_are_for_so_many(portable, tmp_path, monkeypatch):
    """Grouped products are looked up with the number of groups, and of experts of a token."""
    spec = "mxfp8_e4m3@rows"
    problem = Problem("gemm_rows", place_of(CPU), spec, spec, 8, N, K, groups=4, ends="host")
    usual = registry.pick_problem(problem)

    class Other(all_kernels.Kernel):
        op, name, rank, run = "gemm_rows", "other", usual.rank + 1, None

        def accepts(self, given):
            return None

    monkeypatch.setitem(
        all_kernels._kernels, "gemm_rows", [*all_kernels.kernels("gemm_rows"), Other()]
    )
    one = row(8, "other", op="gemm_rows")
    key = one.key._replace(experts=4, top_k=2)
    te_mx.use_tuned_table(written(tmp_path / "mine.csv", one._replace(key=key)))
    same = problem._replace(top_k=2)
    for given, name in (
        (problem, usual.name),
        (same, "other"),
        (same._replace(groups=5), usual.name),
    ):
        assert registry.planned_problem(given)[0].name == name


def test_mixtures_follow_rows_of_their_tokens_experts_and_top_k(portable, tmp_path, monkeypatch):
    """A row of the product of routed rows counts for so many tokens, whatever they are called by:
    a row a token or one a slot."""
    experts, top_k, how = 4, 2, "few rows on portable_f32"
    w = te_mx.quantize(torch.randn(experts, N, K), fmt="mxfp4")
    ran = []
    call = cpu_moe.moe_gemm
    monkeypatch.setattr(
        cpu_moe, "moe_gemm", lambda p, kernels: (ran.append(kernels), call(p, kernels))[1]
    )
    key = Key("cpu_portable", "moe_gemm", "mxfp8_e4m3", "mxfp4", N, K, 4, experts, top_k)
    results = []
    for rows in ([], [Row(key, "cpu", how, 10.0, "cpu", 20.0)]):
        te_mx.use_tuned_table(None)
        if rows:
            te_mx.use_tuned_table(written(tmp_path / "mine.csv", *rows))
        for tokens in (4, 5):
            torch.manual_seed(tokens)
            ids = torch.rand(tokens, experts).topk(top_k).indices
            lists = te_mx.moe.align_block_size(ids, 8, experts)
            x = torch.randn(tokens, K)
            made = te_mx.moe.grouped_gemm(x, w, *lists, top_k=top_k, block_m=8)
            results.append(made)
            slots = x.repeat_interleave(top_k, 0)
            again = te_mx.moe.grouped_gemm(slots, w, *lists, top_k=top_k, block_m=8, a_div=1)
            assert torch.equal(made, again)
    stream, panel = ("portable_f32", "portable_stream"), ("portable_f32", "portable_f32")
    assert ran == [stream] * 4 + [panel] * 2 + [stream] * 2
    torch.testing.assert_close(results[:2], results[2:])

    recipe = te_mx.recipe.BlockScaling(w="mxfp4")
    sizes = {"m": N, "k": K, "recipe": recipe, "experts": experts}
    said = te_mx.explain(n=4, top_k=top_k, **sizes)
    assert said.tuned == (
        f"tuned table mine.csv: kernel cpu, configuration {how}; its bits are not the default's"
    )
    assert "few rows on portable_f32" in said.note
    for other in ({"n": 5, "top_k": top_k}, {"n": 4, "top_k": 1}):
        said = te_mx.explain(**other, **sizes)
        assert said.tuned == "not tuned: default" and "portable_stream" in said.note
    with pytest.raises(ValueError, match="experts and top_k go together, got 4 and None"):
        te_mx.explain(n=4, **sizes)
    with pytest.raises(ValueError, match="go with sizes, layout TN"):
        te_mx.explain(n=4, top_k=1, layout="NN", **sizes)


def test_choices_by_size_are_few(portable, tmp_path):
    """Many rows, above those that tables have, share one answer; where no table knows the op all
    sizes do."""
    registry.forget()
    for m in range(600, 700):
        registry.pick("gemm", CPU, "mxfp8_e4m3@rows", "mxfp8_e4m3@rows", (m, N, K))
    assert len(registry._chosen) == 1
    te_mx.use_tuned_table(written(tmp_path / "mine.csv", row(4)))
    for m in range(600, 700):
        registry.pick("gemm", CPU, "mxfp8_e4m3@rows", "mxfp8_e4m3@rows", (m, N, K))
    (by_size,) = registry._chosen.values()
    assert len(by_size) == 1
    picked = {
        m: registry.pick("gemm", CPU, "mxfp8_e4m3@rows", "mxfp8_e4m3@rows", (m, N, K)).name
        for _ in range(2)
        for m in (4, 5, 3, 16, 4)
    }
    assert picked == {
        4: "portable_f32", 3: "portable_f32", 5: "portable_stream", 16: "portable_stream"
    }  # fmt: skip


def test_configurations_of_hopper_reach_the_native_call(monkeypatch):
    """The kernel of a row runs as the row says, where the epilogue and the call allow it."""
    from te_mx.backends.sm90 import gemm as sm90

    adaptive = next(one for one in all_kernels.kernels("gemm") if one.name == "sm90_adaptive")
    problem = Problem("gemm", Place("cuda", 0), "mxfp8_e4m3@any", "mxfp8_e4m3@any", 4, N, 512)
    tiles = adaptive.configurations(problem)
    assert tiles == ("tile 192x128", "tile 256x128", "tile 128x128", "tile 64x128")
    cut = adaptive.configurations(problem._replace(split_k=True))
    assert cut == (*tiles, "parts 2", "parts 3", "parts 4")  # 512 are four steps of k
    assert sm90.tile_config("tile 64x128") == (3, True, 1)

    calls = []
    monkeypatch.setattr(sm90, "parts", lambda *sizes: 7)
    q = te_mx.quantize(torch.randn(4, K)).operand("rowwise")
    plain, gelu = ops.Epilogue(), ops.Epilogue(gelu="tanh")

    def gemm(args):
        calls.append((args.parts, args.kernel))
        return fake_sm90.OK

    for how, epilogue, may_cut in (
        ("", plain, True), ("", plain, False), ("parts 4", plain, True), ("parts 4", plain, False),
        ("tile 128x128", plain, True), ("tile 128x128", gelu, True), ("tile 64x128", gelu, False),
    ):  # fmt: skip
        with as_on_hopper.hopper() as patch:
            patch.setattr(sm90, "parts", lambda *sizes: 7)
            patch.setattr(fake_sm90, "gemm", gemm)
            one = problem._replace(lhs=q.spec, rhs=q.spec, n=4, k=K, split_k=may_cut)
            product = sm90.Product(q, q, epilogue, torch.empty(4, 4), None, ops.Mode())
            assert adaptive.configured(how).make_plan(one)(product).name == "sm90_adaptive"
    assert calls == [(7, -1), (1, -1), (4, -1), (1, -1), (1, 2), (1, -1), (1, 3)]
    assert adaptive.configuration == ""


def test_rows_that_never_apply_are_named(portable, tmp_path, monkeypatch):
    known = Row(
        Key("gpu", "gemm", "mxfp8_e4m3", "mxfp4+rht32:0x1234abcd", N, K, 4), "a", "", 1, "b", 2
    )
    strange = known._replace(key=known.key._replace(operation="gem", x="mxfp9", w="e4m3"))
    path = written(tmp_path / "t.csv", known, strange)
    with pytest.warns(UserWarning, match="no operation 'gem', format 'e4m3', format 'mxfp9'"):
        assert te_mx.use_tuned_table(path) == 2
    te_mx.use_tuned_table(None)
    monkeypatch.setenv(tables.VARIABLE, str(path))
    with pytest.warns(UserWarning, match="'mxfp9'"):
        said(4)


def test_files_keep_their_rows_and_refuse_others(tmp_path):
    rows = [row(4), row(1, DEFAULT), row(16, "sm90_adaptive", "parts 4", "h200", 6144, 2048)]
    path = written(tmp_path / "deep" / "mine.csv", *rows)
    assert tables.read(path) == sorted(rows) and tables.remarks_of(path) == ["of a test"]
    assert [p.name for p in path.parent.iterdir()] == ["mine.csv"]  # no half-written file
    text = path.read_text()
    for old, new, why in (
        (",96,128,1,", ",96,128,0,", "m must be a whole number from 1 on, got '0'"),
        (",96,128,1,", ",96,x,1,", "k must be a whole number"),
        (",96,128,1,", ",96,128,1024,", "m must be at most 512"),
        (",10,", ",-1,", "us must be microseconds"),
        (",10,", ",nan,", "us must be microseconds"),
        (",gemm,", ",,", "operation is empty"),
        (",20\n", ",20,more\n", "expected 14 columns, got 15"),
        (",96,128,1,", ",96,128,4,", "is there twice"),
        ("device,", "machine,", "is no tuned table"),
    ):
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match=why):
            te_mx.use_tuned_table(path)
    with pytest.raises(ValueError, match="cannot be read"):
        te_mx.use_tuned_table(tmp_path / "nothing.csv")
    assert tables.loaded(Place("meta")) == []  # an error adds nothing
