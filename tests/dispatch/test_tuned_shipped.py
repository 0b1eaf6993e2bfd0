"""The tables that come with te_mx: in order, followed, and without a choice that changes a bit."""

from __future__ import annotations

import as_on_hopper
import pytest
import torch

import te_mx
from te_mx.backends.cpu import binding as cpu
from te_mx.commands.candidates import TOKENS, keeps_bits, of_models
from te_mx.commands.tune import SAME_BITS, recipe_of
from te_mx.dispatch import kernels as all_kernels
from te_mx.dispatch.problem import Place, Problem, place_of
from te_mx.dispatch.tuned import tables
from te_mx.dispatch.tuned.tables import DEFAULT

NAMES = ("cpu_amx", "h200")
MODELS = ("llama3_8b", "llama3_70b", "moe_6144", "moe_6144_experts")
MOST_BYTES = 200_000
pytestmark = pytest.mark.skipif(cpu.missing_reason() is not None, reason="no native module")


@pytest.fixture(params=NAMES)
def name(request, monkeypatch):
    """A table, on a machine that is taken for one of its device."""
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    monkeypatch.setitem(tables._names, "cpu", lambda place: "cpu_amx")
    monkeypatch.setitem(tables._names, "cuda", lambda place: "h200")
    te_mx.use_tuned_table(None)
    if request.param == "h200":
        with as_on_hopper.hopper():
            yield request.param
    else:
        before = cpu.ISA_LEVELS[cpu.isa()]
        cpu.set_isa(cpu.available_isa()[-1])
        yield request.param
        cpu.set_isa(before)
    monkeypatch.undo()
    te_mx.use_tuned_table(None)


def problem_of(key, place):
    fmt = te_mx.formats.get(key.w)
    layout = "rows" if key.operation == "moe_gemm" else "any"
    return Problem(
        key.operation, place, f"{key.x}@{layout}", f"{fmt.name}@{layout}", key.m, key.n, key.k,
        key.experts, top_k=key.top_k, dtype=torch.bfloat16,
    )  # fmt: skip


def test_rows_are_in_order_and_change_no_bits(name):
    """Each names an op, formats and a kernel of this te_mx; one that is not the default takes the
    problem, and adds up as the default does."""
    path = tables.FOLDER / f"{name}.csv"
    assert path.stat().st_size < MOST_BYTES and SAME_BITS in tables.remarks_of(path)
    place = place_of(torch.device("cpu"))
    for one in tables.read(path):
        kernels = {kernel.name: kernel for kernel in all_kernels.kernels(one.key.operation)}
        assert one.key.device == path.stem and one.default in kernels
        assert {one.key.x, one.key.w} <= set(te_mx.formats.names())
        if one.use != DEFAULT:
            problem, kernel = problem_of(one.key, place), kernels[one.use]
            assert kernel.accepts(problem) is None and one.gain >= 1.03
            assert one.configuration in ("", *kernel.configurations(problem))
            assert keeps_bits(kernel.configured(one.configuration), problem)


def test_every_projection_of_the_models_has_rows(name):
    """In both formats; explain names the table."""
    keys = {row.key[1:] for row in tables.read(tables.FOLDER / f"{name}.csv")}
    for w in ("mxfp8_e4m3", "mxfp4"):
        for m, n, k, _, experts, top_k in of_models(MODELS, TOKENS):
            op = "moe_gemm" if experts else "gemm"
            assert (op, "mxfp8_e4m3", w, n, k, m, experts, top_k) in keys
    asked = {"m": 6144, "n": 3, "k": 4096, "recipe": recipe_of("mxfp4")}
    assert (
        te_mx.explain(**asked).tuned == f"tuned table {name}.csv: the default, which nothing beat"
    )
    more = {"m": 1536, "n": 8, "k": 6144, "experts": 128, "top_k": 4}
    assert te_mx.explain(**more).tuned.startswith(f"tuned table {name}.csv")


def test_rows_with_another_choice_are_followed(name):
    chosen = [row for row in tables.read(tables.FOLDER / f"{name}.csv") if row.use != DEFAULT]
    for row in chosen:
        assert row.key.operation == "gemm"
        said = te_mx.explain(m=row.key.n, n=row.key.m, k=row.key.k, recipe=recipe_of(row.key.w))
        assert said.kernel == row.use
        assert said.tuned == (
            f"tuned table {name}.csv: kernel {row.use}, configuration {row.configuration}"
        )


def test_off_follows_none(name, monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, tables.OFF)
    te_mx.use_tuned_table(None)
    assert te_mx.explain(m=6144, n=4, k=4096).tuned == "not tuned: default"


def test_devices_without_a_table_have_none():
    assert not tables.loaded(Place("meta"))
    assert {path.stem for path in tables.FOLDER.glob("*.csv")} == set(NAMES)
