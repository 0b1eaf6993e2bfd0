"""te_mx.grouped_gemm, and quantized weights and aligned groups in the other grouped functions:
every form against a loop over the groups, bit for bit."""

from __future__ import annotations

import pytest
import torch
from grouped_cases import RECIPES, equal
from torch import Tensor

import te_mx
from te_mx._ops import grouped_quantize
from te_mx.api import grouped, groups
from te_mx.autograd import grouped as autograd_grouped
from te_mx.backends.cpu import grouped as cpu_grouped
from te_mx.backends.reference import grouped as reference_grouped
from te_mx.recipe import BlockScaling
from te_mx.weights import weight_only

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
K, N = 80, 48
PAIRS = [
    ("mxfp8_e4m3", "mxfp8_e4m3"),
    ("mxfp4", "mxfp4"),
    ("mxfp8_e5m2", "mxfp4"),
    ("mxfp4", "mxfp8_e4m3"),
    ("fp8_e4m3_1x128", "fp8_e4m3_1x128"),
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
]
paired = pytest.mark.parametrize(("x_fmt", "w_fmt"), PAIRS)
COUNTS = [33, 0, 5, 16, 0]  # a group of several blocks, one of few rows, empty ones at the end too
G = len(COUNTS)


class Case:
    """Tokens that are NaN where no group is, and weights, one MXTensor each."""

    def __init__(self, x_fmt: str, w_fmt: str) -> None:
        torch.manual_seed(0)
        self.x_fmt = x_fmt
        self.x = [torch.randn(count, K) for count in COUNTS]
        self.bias = torch.randn(G, N)
        self.w = [te_mx.quantize(torch.randn(N, K), fmt=w_fmt) for _ in COUNTS]
        stacks = w_fmt != "fp8_e4m3_128x128"  # whose blocks would hold rows of two groups
        self.weight = self.stacked() if stacks else self.w

    def stacked(self) -> te_mx.MXTensor:
        held = [(w.rowwise_data.view(torch.uint8), w.rowwise_scale) for w in self.w]
        codes, scales = (torch.cat([each[i] for each in held]) for i in range(2))
        fmt, shape = self.w[0].fmt, (G, N, K)
        return te_mx.MXTensor(shape, fmt, rowwise_data=codes, rowwise_scale=scales)

    def tokens(self, x: Tensor) -> te_mx.MXTensor:
        return te_mx.quantize(x, fmt=self.x_fmt)

    def expected(self, out_dtype: torch.dtype, bias: bool) -> list[Tensor]:
        made = []
        for x, w, b in zip(self.x, self.w, self.bias, strict=True):
            added = b if bias else None
            made.append(te_mx.gemm(w, self.tokens(x), bias=added, out_dtype=out_dtype).out)
        return made


def spread_out(parts: list[Tensor], starts: list[int], rows: int, fill: float) -> Tensor:
    """The rows of every group at its start, `fill` elsewhere."""
    out = torch.full((rows, parts[0].shape[1]), fill, dtype=parts[0].dtype)
    for part, start in zip(parts, starts, strict=True):
        out[start : start + len(part)] = part
    return out


def aligned_starts(alignment: int) -> tuple[list[int], Tensor]:
    """(starts, end offsets) of groups that begin at multiples of alignment."""
    starts, ends, at = [], [], 0
    for count in COUNTS:
        starts.append(-(-at // alignment) * alignment)
        at = starts[-1] + count if count else at
        ends.append(at)
    return starts, torch.tensor(ends)


def shuffled() -> Tensor:
    index = torch.repeat_interleave(torch.arange(G), torch.tensor(COUNTS))
    index = torch.cat([index, torch.full((7,), -1)])
    return index[torch.randperm(len(index), generator=torch.Generator().manual_seed(1))]


@pytest.fixture(params=[False, True], ids=["host", "device"])
def unseen(request, monkeypatch):
    """Twice: with offsets that the host reads, and as if they lay on a device."""
    if request.param:

        def refuse(*args: object) -> None:
            raise AssertionError("the host looked at the splits")

        monkeypatch.setattr("te_mx.api.groups.readable", lambda tensor: False)
        for module in (groups, grouped):
            monkeypatch.setattr(module, "readable", lambda tensor: False)
        plain = weight_only, autograd_grouped
        for module in (grouped_quantize, reference_grouped):
            monkeypatch.setattr(module, "known_to_host", lambda offs: False)
        for module in plain:
            monkeypatch.setattr(module, "readable", lambda offs: False)
        for module in (cpu_grouped, reference_grouped, *plain):
            monkeypatch.setattr(module, "host_bounds", refuse)
    return request.param


def same(got: Tensor, wanted: Tensor, unseen: bool) -> None:
    """Bit for bit where groups are multiplied one by one; else sums have another order."""
    if unseen:
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    else:
        equal(got, wanted)
    assert got.isfinite().all()


@paired
@pytest.mark.parametrize("int32", [False, True])
def test_end_offsets(x_fmt, w_fmt, int32, unseen):
    case, rows = Case(x_fmt, w_fmt), sum(COUNTS) + 9
    offs = torch.tensor(COUNTS).cumsum(0)
    starts = [0, *offs[:-1].tolist()]
    q = case.tokens(spread_out(case.x, starts, rows, torch.nan))
    offs = offs.int() if int32 else offs
    y = te_mx.grouped_gemm(q, case.weight, offs=offs, bias=case.bias, out_dtype=torch.float32)
    same(y, spread_out(case.expected(torch.float32, True), starts, rows, 0), unseen)


@paired
@pytest.mark.parametrize("alignment", [3, 32, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_aligned_groups(x_fmt, w_fmt, alignment, bias, unseen):
    """DeepGEMM's psum layout for 128; the end of an empty group is that of the one before."""
    case = Case(x_fmt, w_fmt)
    starts, ends = aligned_starts(alignment)
    rows = starts[-1] + 9
    q = case.tokens(spread_out(case.x, starts, rows, torch.nan))
    given = {"offs": ends, "alignment": alignment, "bias": case.bias if bias else None}
    y = te_mx.grouped_gemm(q, case.weight, **given, out_dtype=torch.float32)
    wanted = spread_out(case.expected(torch.float32, bias), starts, rows, 0)
    same(y, wanted, unseen)
    # Ends of empty groups may stand at their starts as well.
    other = torch.tensor([s + c for s, c in zip(starts, COUNTS, strict=True)])
    given["offs"] = other
    same(te_mx.grouped_gemm(q, case.weight, **given, out_dtype=torch.float32), wanted, unseen)
    left = te_mx.grouped_gemm(q, case.weight, **given, out_dtype=torch.float32, zero_padding=False)
    for start, count in zip(starts, COUNTS, strict=True):
        same(left[start : start + count], wanted[start : start + count], unseen)


@paired
def test_an_index_for_every_row(x_fmt, w_fmt, unseen):
    case, index = Case(x_fmt, w_fmt), shuffled()
    x, wanted = torch.full((len(index), K), torch.nan), torch.zeros(len(index), N)
    for g, part in enumerate(case.expected(torch.float32, True)):
        x[index == g], wanted[index == g] = case.x[g], part
    y = te_mx.grouped_gemm(
        case.tokens(x), case.weight, index=index, bias=case.bias, out_dtype=torch.float32
    )
    same(y, wanted, unseen)


@paired
def test_masked(x_fmt, w_fmt, unseen):
    case, most = Case(x_fmt, w_fmt), 40
    starts = [g * most for g in range(G)]
    x = spread_out(case.x, starts, G * most, torch.nan).view(G, most, K)
    y = te_mx.grouped_gemm(
        case.tokens(x), case.weight, masked_m=torch.tensor(COUNTS), bias=case.bias,
        out_dtype=torch.float32,
    )  # fmt: skip
    wanted = spread_out(case.expected(torch.float32, True), starts, G * most, 0)
    same(y, wanted.view(G, most, N), unseen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_the_result(dtype):
    case, offs = Case("mxfp8_e4m3", "mxfp4"), torch.tensor(COUNTS).cumsum(0)
    q = case.tokens(torch.cat(case.x))
    y = te_mx.grouped_gemm(q, case.w, offs=offs, bias=case.bias, out_dtype=dtype)
    equal(y, torch.cat(case.expected(dtype, True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["offs", "index", "masked_m"])
def test_results_that_are_written_or_added(form, dtype):
    """The bits of te_mx.gemm into the rows of each group; rows of none are 0, or stay."""
    case, most = Case("mxfp8_e4m3", "mxfp4"), 40
    index, counts = shuffled(), torch.tensor(COUNTS)
    rows = {"offs": sum(COUNTS) + 3, "index": len(index), "masked_m": G * most}[form]
    ends = counts.cumsum(0)
    of = torch.full((rows,), -1)  # the group of each row
    for g, count in enumerate(COUNTS):
        start = g * most if form == "masked_m" else int(ends[g]) - count
        of[start : start + count] = g
    of = index if form == "index" else of
    x = torch.full((rows, K), torch.nan)
    for g, part in enumerate(case.x):
        x[of == g] = part
    given = {"offs": ends, "index": index, "masked_m": counts}[form]
    shape, room = (rows, N), (rows, K)
    if form == "masked_m":
        shape, room = (G, most, N), (G, most, K)
    before = torch.randn(rows, N).to(dtype)
    for accumulate in (False, True):
        out = before.clone().view(shape)
        how = {form: given, "bias": case.bias, "out": out, "accumulate": accumulate}
        assert te_mx.grouped_gemm(case.tokens(x.view(room)), case.weight, **how) is out
        wanted = before.clone() if accumulate else torch.zeros_like(before)
        for g, (part, w) in enumerate(zip(case.x, case.w, strict=True)):
            one = before[of == g]
            te_mx.gemm(w, case.tokens(part), bias=case.bias[g], out=one, accumulate=accumulate)
            wanted[of == g] = one
        equal(out.view(rows, N), wanted)


# ----------------------------------------------------------------- tokens that are not quantized
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("w_fmt", ["mxfp4", "mxfp8_e4m3", "fp8_e4m3_128x128"])
@pytest.mark.parametrize("form", ["offs", "aligned", "index", "masked_m"])
def test_weight_only(form, w_fmt, dtype, out_dtype, unseen):
    case, most = Case("mxfp8_e4m3", w_fmt), 40
    x, bias = [part.to(dtype) for part in case.x], case.bias.to(dtype)
    wanted = [
        te_mx.gemm(w, part, bias=b, out_dtype=out_dtype).out
        for w, part, b in zip(case.w, x, bias, strict=True)
    ]
    starts, ends = aligned_starts(32)
    if form == "index":
        index = shuffled()
        tokens = torch.full((len(index), K), torch.nan, dtype=dtype)
        expected = torch.zeros(len(index), N, dtype=out_dtype)
        for g, part in enumerate(wanted):
            tokens[index == g], expected[index == g] = x[g], part
        given = {"index": index}
    else:
        given = {
            "offs": {"offs": torch.tensor(COUNTS).cumsum(0)},
            "aligned": {"offs": ends, "alignment": 32},
            "masked_m": {"masked_m": torch.tensor(COUNTS)},
        }[form]
        if form == "offs":
            starts = [0, *given["offs"][:-1].tolist()]
        elif form == "masked_m":
            starts = [g * most for g in range(G)]
        tokens, expected = (
            spread_out(parts, starts, G * most, fill)
            for parts, fill in ((x, torch.nan), (wanted, 0.0))
        )
        if form == "masked_m":
            tokens, expected = tokens.view(G, most, K), expected.view(G, most, N)
    y = te_mx.grouped_gemm(tokens, case.weight, **given, bias=bias, out_dtype=out_dtype)
    assert y.dtype == out_dtype and y.shape == expected.shape and y.isfinite().all()
    if unseen:  # sums in another order
        ulp = 2**-7 if out_dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(y, expected, rtol=ulp, atol=1e-4)
    else:
        equal(y, expected)


def test_weight_only_refuses_what_does_not_fit():
    x, w = torch.ones(6, K, dtype=torch.bfloat16), te_mx.quantize(torch.ones(2, N, K), fmt="mxfp4")
    offs = torch.tensor([2, 6])
    turned = te_mx.quantize(torch.ones(2, N, K), fmt="mxfp4+rht32:0x1")
    for inp, weight, says in (
        (x.float(), w, "inp must be an MXTensor, .*quantize"),
        (x[:, :-1], w, "inp must be"),
        (x, turned, "weight is mxfp4.*Hadamard"),
        (x.to_sparse(), w, "inp"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            te_mx.grouped_gemm(inp, weight, offs=offs)


# --------------------------------------------------------------- the functions that quantize tokens
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4", "fp8_e4m3_1x128"])
@pytest.mark.parametrize("form", ["offs", "index", "masked_m", "aligned"])
def test_weights_that_are_quantized(form, fmt):
    """Tokens in the recipe's format; the values of one pass through both functions."""
    x_fmt = "fp8_e4m3_1x128" if fmt.startswith("fp8") else "mxfp8_e4m3"
    recipe = BlockScaling(x_fmt, x_fmt, x_fmt, scale_rule="pow2" if fmt[:3] == "fp8" else "rceil")
    case, counts = Case(x_fmt, fmt), torch.tensor(COUNTS)
    starts, ends = aligned_starts(32)
    x = torch.cat(case.x)
    given = {
        "offs": {"offs": counts.cumsum(0)}, "index": {"index": shuffled()},
        "masked_m": {"masked_m": counts}, "aligned": {"offs": ends, "alignment": 32},
    }  # fmt: skip
    if form == "index":
        x = torch.cat([x, x[:7]])
    elif form != "offs":
        x = spread_out(case.x, starts if form == "aligned" else range(0, G * 40, 40), G * 40, 1.0)
        x = x.view(G, 40, K) if form == "masked_m" else x
    y = te_mx.grouped_linear(x, case.weight, **given[form], bias=list(case.bias), recipe=recipe)
    q = te_mx.quantize(x, fmt=x_fmt)
    wanted = te_mx.grouped_gemm(
        q, case.w, **given[form], bias=case.bias, out_dtype=torch.float32, recipe=recipe
    )
    equal(y, wanted)


@pytest.mark.parametrize("alignment", [32, 128])
@pytest.mark.parametrize("name", [*sorted(RECIPES), "mxfp4"])
def test_gradients_of_aligned_groups(name, alignment):
    """What groups without gaps have, and zeros between them."""
    recipe = RECIPES.get(name) or BlockScaling(x="mxfp4", w="mxfp4")
    case = Case("e4m3", "e4m3")
    starts, ends = aligned_starts(alignment)
    rows = starts[-1] + 9
    weight = torch.randn(G, N, K)
    grads = [torch.randn(count, N) for count in COUNTS]
    results = []
    for spaced in (False, True):
        leaves = [weight.clone().requires_grad_(), case.bias.clone().requires_grad_()]
        x, g = torch.cat(case.x), torch.cat(grads)
        given = {"offs": torch.tensor(COUNTS).cumsum(0)}
        if spaced:
            x = spread_out(case.x, starts, rows, torch.nan)
            g = spread_out(grads, starts, rows, 7.0)
            given = {"offs": ends, "alignment": alignment}
        x.requires_grad_()
        y = te_mx.grouped_linear(x, leaves[0], bias=leaves[1], recipe=recipe, **given)
        y.backward(g)
        dw = te_mx.grouped_wgrad(g, x.detach(), recipe=recipe, **given)
        results.append((y.detach(), x.grad, leaves[0].grad, leaves[1].grad, dw))
    for i, (tight, spaced) in enumerate(zip(*results, strict=True)):
        wanted = tight
        if i < 2:
            wanted = spread_out(list(tight.split(COUNTS)), starts, rows, 0)
        equal(spaced, wanted)


@pytest.mark.parametrize(
    "ends, group",
    [([5, 6, 300, 300, 300], 1), ([128, 300, 301, 301, 301], 2), ([5, 5, 7, 200, 200], 2)],
)
def test_aligned_groups_that_end_in_front_of_their_start(ends, group):
    case = Case("mxfp8_e4m3", "mxfp4")
    q = case.tokens(torch.randn(400, K))
    with pytest.raises(ValueError, match=f"group {group} starts at row"):
        te_mx.grouped_gemm(q, case.weight, offs=torch.tensor(ends), alignment=128)
    with pytest.raises(ValueError, match="grouped_linear: with alignment=128"):
        te_mx.grouped_linear(
            torch.randn(400, K), torch.randn(G, N, K), offs=torch.tensor(ends), alignment=128
        )


def test_offsets_of_a_device_that_mean_nothing(unseen):
    """The host refuses them where it sees them; else they are cut off and reach no memory."""
    case = Case("mxfp8_e4m3", "mxfp4")
    q = case.tokens(torch.cat(case.x))
    wrong = [[-(2**62)] * G, [2**62] * G, [40, 3, -5, 2**31, 7]]
    for ends in wrong:
        for alignment in (1, 128):
            given = {"offs": torch.tensor(ends), "alignment": alignment}
            if not unseen:
                with pytest.raises(ValueError, match="offs must be end offsets that rise"):
                    te_mx.grouped_gemm(q, case.weight, **given)
                continue
            y = te_mx.grouped_gemm(q, case.weight, **given)
            cut = torch.tensor(ends).clamp(0, len(y)).cummax(0).values
            equal(y, te_mx.grouped_gemm(q, case.weight, offs=cut, alignment=alignment))
    wrong_rows = (-(2**62), "masked_m"), (2**62, "masked_m"), (2**31 - 1, "index"), (-2, "index")
    for values, name in wrong_rows:
        shape = (G,) if name == "masked_m" else (len(q.rowwise_data),)
        given = {name: torch.full(shape, values)}
        own = case.tokens(torch.ones(G, 4, K)) if name == "masked_m" else q
        if not unseen:
            with pytest.raises(ValueError, match=f"{name} must be"):
                te_mx.grouped_gemm(own, case.weight, **given)
            continue
        y = te_mx.grouped_gemm(own, case.weight, **given)
        assert (y == 0).all() or values == 2**62


COLUMN_PAIRS = [pair for pair in PAIRS if "128x128" not in pair[1]]


@pytest.mark.parametrize(("g_fmt", "x_fmt"), COLUMN_PAIRS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_columns_that_are_quantized(g_fmt, x_fmt, turned, gaps, unseen):
    """The product over the rows of every group, bit for bit that of te_mx.gemm: groups of whole
    blocks, or of any number of rows that start at blocks."""
    torch.manual_seed(0)
    counts = [128, 0, 256, 128, 0] if not gaps else [33, 0, 200, 5, 0]
    starts, end = [], 0
    for count in counts:
        starts.append(-(-end // 128) * 128)
        end = starts[-1] + count if count else end
    ends = torch.tensor([s + c if c else 0 for s, c in zip(starts, counts, strict=True)])
    offs, rows = ends.cummax(0).values.int(), starts[-1] + 130
    inside = torch.zeros(rows, 1, dtype=torch.bool)
    for start, count in zip(starts, counts, strict=True):
        inside[start : start + count] = True
    # Rows between groups are quantized with those of a group, and still add nothing.
    sides = [torch.randn(rows, width) for width in (N, K)]
    q = [
        te_mx.quantize(x, fmt=fmt, rowwise=False, columnwise=True, columnwise_transposed=turned)
        for x, fmt in zip(sides, (g_fmt, x_fmt), strict=True)
    ]
    out = torch.ones(len(counts), N, K)
    aligned = {} if not (gaps or unseen) else {"alignment": 128}
    made = te_mx.grouped_wgrad(*q, offs, out_dtype=torch.float32, **aligned)
    te_mx.grouped_wgrad(*q, offs, out=out, accumulate=True, **aligned)
    assert te_mx.grouped_wgrad(*q, offs, **aligned).dtype == torch.bfloat16
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        grad, inp = (t.dequantize(usage="columnwise")[start : start + count] for t in q)
        exact = grad.double().T @ inp.double()
        torch.testing.assert_close(made[i].double(), exact, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(out[i].double(), 1 + exact, rtol=1e-5, atol=1e-4)
        if not gaps and not unseen and count:  # the codes and scales of the group alone
            own = [_part(t, start, count) for t in q]
            wanted = te_mx.gemm(own[1], own[0], "NT", out_dtype=torch.float32, split_k=False)
            equal(made[i], wanted.out)


def _part(t: te_mx.MXTensor, start: int, count: int) -> te_mx.MXTensor:
    """Rows of a columnwise copy that are whole blocks."""
    block, codes, scales = t.format.block, t.columnwise_data, t.columnwise_scale
    if t.columnwise_transposed:
        codes, scales = codes.t(), scales.t()
    per = 2 if t.columnwise_transposed and t.format.element.bits == 4 else 1
    codes = codes[start // per : (start + count) // per]
    scales = scales[start // block : (start + count) // block]
    if t.columnwise_transposed:
        codes, scales = codes.t(), scales.t()
    return te_mx.MXTensor(
        (count, t.cols), t.fmt, columnwise_data=codes.contiguous(),
        columnwise_scale=scales.contiguous(), columnwise_transposed=t.columnwise_transposed,
    )  # fmt: skip


def test_columns_that_do_not_fit_are_refused(monkeypatch):
    def columns(rows: int, cols: int, fmt: str = "e4m3", **given: bool) -> te_mx.MXTensor:
        given = {"rowwise": False, "columnwise": True, **given}
        return te_mx.quantize(torch.ones(rows, cols), fmt=fmt, **given)

    g, x, offs = columns(96, 8), columns(96, 16), torch.tensor([40, 96])
    with pytest.raises(ValueError, match="group 1 starts at row 40, inside of one of the blocks"):
        te_mx.grouped_wgrad(g, x, offs)
    with pytest.raises(ValueError, match="blocks of 128 rows in which inp"):
        te_mx.grouped_wgrad(g, columns(96, 16, "fp8_e4m3_1x128"), torch.tensor([32, 96]))
    with pytest.raises(TypeError, match="both be tensors or both MXTensors, got inp of tensor"):
        te_mx.grouped_wgrad(g, torch.ones(96, 16), offs)
    with pytest.raises(ValueError, match="grad has no columnwise copy"):
        te_mx.grouped_wgrad(te_mx.quantize(torch.ones(96, 8)), x, offs)
    with pytest.raises(ValueError, match="blocks hold several columns"):
        te_mx.grouped_wgrad(g, columns(96, 16, "fp8_e4m3_128x128"), offs)
    with pytest.raises(ValueError, match="transform mixes the rows"):
        te_mx.grouped_wgrad(g, columns(96, 16, "mxfp4+rht32:0x1"), offs)
    with pytest.raises(ValueError, match="same rows, got 96 and 64"):
        te_mx.grouped_wgrad(g, columns(64, 16), offs)
    monkeypatch.setattr(grouped, "readable", lambda tensor: False)
    with pytest.raises(ValueError, match=r"nobody can see .* with alignment=32"):
        te_mx.grouped_wgrad(g, x, offs)


def test_compiled():
    torch._dynamo.reset()
    case = Case("mxfp8_e4m3", "mxfp4")
    counts, x = torch.tensor(COUNTS), torch.cat(case.x)
    w = torch.randn(G, N, K)

    def forms(x: Tensor, offs: Tensor) -> list[Tensor]:
        return [
            te_mx.grouped_linear(x, w, offs=offs, alignment=4),
            te_mx.grouped_wgrad(x, x, offs, alignment=4),
        ]

    columns = te_mx.quantize(torch.cat([x, x]), rowwise=False, columnwise=True)
    product = torch.compile(te_mx.grouped_wgrad, fullgraph=True, backend="aot_eager")
    offs = torch.tensor([32, 64, 90])
    expected = te_mx.grouped_wgrad(columns, columns, offs)
    torch.testing.assert_close(product(columns, columns, offs, alignment=32), expected)

    args = (torch.cat([x, x]), counts.cumsum(0))
    compiled = torch.compile(forms, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*args), forms(*args), strict=True):
        torch.testing.assert_close(got, expected)
