"""Mixtures with many rows an expert on Hopper: sorted slots, whole mixtures and single products in
tiles, against loops in fp64; more slots and pieces than a launch used to take."""

from __future__ import annotations

import pytest
import sm90_calls as calls
import torch

import te_mx
from te_mx._ops import Quantize
from te_mx._ops.fused import act_quantize_2d
from te_mx._ops.grouped_fused import act_quantize_grouped
from te_mx.backends.reference.quantize import quantize as reference_quantize
from te_mx.backends.sm90 import experts as tiles
from te_mx.backends.sm90 import experts_mxfp4, grouped
from te_mx.backends.sm90.layouts import groups as sm90_groups
from te_mx.dispatch.calls import ActGroups, GroupedRows, Groups, Mode, QuantizeGroups
from te_mx.dispatch.fused import Activation, ActStep, Target
from te_mx.recipe import MXFP8BlockScaling

DEVICE = "cuda"
FORMATS = ("e4m3", "mxfp4")


def routed(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Slots of different experts a token, as routers give them."""
    return torch.rand(tokens, experts, device=DEVICE).argsort(1)[:, :top_k].int()


def lists(ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """sorted_token_ids up to the last block, and expert_ids, in a loop."""
    flat, positions, owners = ids.flatten().cpu(), [], []
    for e in range(experts):
        own = (flat == e).nonzero().flatten()
        fill = -len(own) % block
        positions += [own, torch.full((fill,), len(flat))]
        owners += [e] * ((len(own) + fill) // block)
    return torch.cat(positions), torch.tensor(owners)


@pytest.mark.parametrize(
    ("experts", "slots", "block"),
    [(7, 4200, 8), (1200, 2500, 4), (128, 131072, 64), (4096, 20000, 16)],
)
def test_lists_of_many_slots(experts, slots, block):
    torch.manual_seed(0)
    ids = torch.randint(-1, experts, (slots,), device=DEVICE).int()
    if ids.is_cuda:  # where the host does not look
        ids[5::97] = 1 << 20
    made = te_mx.moe.align_block_size(ids.view(-1, 4), block, experts)
    positions, owners = lists(ids, block, experts)
    used = len(positions)
    assert made.num_tokens_post_padded.tolist() == [used]
    assert torch.equal(made.sorted_token_ids[:used].cpu().long(), positions)
    assert bool((made.sorted_token_ids[used:] == slots).all())
    assert torch.equal(made.expert_ids[: len(owners)].cpu().long(), owners)
    assert bool((made.expert_ids[len(owners) :] == -1).all())


def test_slots_sorted_for_tiles():
    torch.manual_seed(0)
    expert_map = torch.tensor([2, -1, 0, 1, 9, -1], device=DEVICE).int()
    ids = torch.randint(-1, 7, (700, 3), device=DEVICE).int()  # six experts
    made = tiles.sort_slots(ids, 3, 3, expert_map)
    known = (ids >= 0) & (ids < 6)
    local = torch.where(known, expert_map[ids.clamp(0, 5).long()], -1).flatten()
    local = torch.where(local < 3, local, -1)
    order = torch.cat([(local == e).nonzero().flatten() for e in range(3)])
    counts = torch.stack([(local == e).sum() for e in range(3)])
    assert torch.equal(made.ends.long(), counts.cumsum(0))
    assert torch.equal(made.rows[: len(order)].long(), order // 3)
    want = torch.full((2100,), -1, device=DEVICE)
    want[order] = torch.arange(len(order), device=DEVICE)
    assert torch.equal(made.positions.long(), want)


def test_more_pieces_than_a_launch_takes():
    """2,100 blocks of one row, and the same rows in lists of 2,048 pieces and more."""
    torch.manual_seed(0)
    rows, experts, n, k = 2100, 3, 16, 32
    a, w = (te_mx.quantize(torch.randn(s, device=DEVICE)) for s in ((rows, k), (experts, n, k)))
    ids = torch.randint(0, experts, (rows, 1), device=DEVICE).int()
    want = torch.einsum(
        "rk,rnk->rn", a.dequantize().double(), w.dequantize().double()[ids[:, 0].long()]
    )
    count = torch.tensor([rows], device=DEVICE).int()
    how = {"top_k": 1, "out_dtype": torch.float32, "recipe": MXFP8BlockScaling(precision="exact")}
    made = te_mx.moe.grouped_gemm(a, w, None, ids[:, 0].contiguous(), count, block_m=1, **how)
    torch.testing.assert_close(made.double(), want, rtol=1e-5, atol=1e-5)
    made = te_mx.moe.grouped_gemm(
        a, w, *te_mx.moe.align_block_size(ids, 20000, experts), block_m=20000, **how
    )
    torch.testing.assert_close(made.double(), want, rtol=1e-5, atol=1e-5)


def expected(x, w13, w2, scores, ids, act, in_pairs=False, expert_map=None, biases=(None, None)):
    """The mixture of x, quantized, in fp64; h and what is activated rounded as te_mx does."""
    dtype, x = x.dtype, te_mx.quantize(x).dequantize().double()
    first, second = w13.dequantize().double(), w2.dequantize().double()
    y = x.new_zeros(len(x), second.shape[1])
    ids = torch.where((ids >= 0), ids.long(), -1)
    if expert_map is not None:
        ids = torch.where(ids >= 0, expert_map.long()[ids.clamp(0)], -1)
    for e in range(len(first)):
        token, slot = torch.where(ids == e)
        if len(token) == 0:
            continue
        h = x[token] @ first[e].T + (0 if biases[0] is None else biases[0][e].double())
        h = h.to(dtype).double()
        gate, up = (h[:, ::2], h[:, 1::2]) if in_pairs else h.chunk(2, 1)
        if act == "swigluoai":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            middle = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            middle = torch.nn.functional.silu(gate) * up
        middle = te_mx.quantize(middle.to(dtype)).dequantize().double()
        out = middle @ second[e].T + (0 if biases[1] is None else biases[1][e].double())
        y.index_add_(0, token, out * scores[token, slot].double().unsqueeze(1))
    return y


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden", "inner", "how"),
    [
        (200, 2, 4, 96, 64, "plain"), (150, 3, 5, 136, 40, "gpt-oss"), (130, 2, 3, 100, 50, "map"),
        (2048, 6, 64, 2048, 1408, "plain"), (2048, 4, 32, 2880, 2880, "gpt-oss"),
        (8192, 8, 128, 512, 256, "map"), (16384, 8, 16, 256, 128, "plain"),
    ],
)  # fmt: skip
def test_mixtures(tokens, top_k, experts, hidden, inner, how, fmt, monkeypatch):
    torch.manual_seed(tokens + hidden)
    ran = []
    run = tiles.HopperExperts.run
    monkeypatch.setattr(
        tiles.HopperExperts, "run", lambda self, what: ran.append(1) or run(self, what)
    )
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    w13, w2 = (te_mx.quantize(torch.randn(s, device=DEVICE) / s[2] ** 0.5, fmt=fmt) for s in shapes)
    ids, scores = routed(tokens, top_k, experts), torch.rand(tokens, top_k, device=DEVICE)
    ids[3] = -1
    options, told = {}, {"act": "silu"}
    if how == "gpt-oss":
        biases = (
            torch.randn(experts, 2 * inner, device=DEVICE),
            torch.randn(experts, hidden, device=DEVICE),
        )
        options = {"activation": "swigluoai", "interleaved": True, "biases": biases}
        told = {"act": "swigluoai", "in_pairs": True, "biases": biases}
    if how == "map":  # twice as many experts, half of them here, in another order
        local = torch.full((2 * experts,), -1, device=DEVICE)
        local[torch.randperm(2 * experts, device=DEVICE)[:experts]] = torch.arange(
            experts, device=DEVICE
        )
        ids = torch.where(ids >= 0, routed(tokens, top_k, 2 * experts), -1)
        options, told["expert_map"] = {"expert_map": local}, local
    made = te_mx.moe.fused_experts(x, w13, w2, scores, ids, **options)
    assert ran == [1]
    want = expected(x, w13, w2, scores, ids, **told)
    error = (made.double() - want).norm() / want.norm()
    assert float(error) <= 2.0**-7
    assert made.dtype == x.dtype and bool((made[3] == 0).all())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("tokens", "n", "k"), [(300, 24, 70), (40, 9, 64), (3000, 256, 512)])
def test_products(tokens, n, k, fmt):
    """Of many rows an expert, and of weights that the kernel for few rows does not take."""
    torch.manual_seed(0)
    experts, top_k = 4, 2
    w = te_mx.quantize(torch.randn(experts, n, k, device=DEVICE), fmt=fmt)
    ids = routed(tokens, top_k, experts)
    ids[1, 0] = -1
    lists = te_mx.moe.align_block_size(ids, 16, experts)
    weights, bias = torch.rand(tokens, top_k, device=DEVICE), torch.randn(experts, n, device=DEVICE)
    a = te_mx.quantize(torch.randn(tokens, k, device=DEVICE))
    out = torch.full((tokens * top_k, n), 7.0, device=DEVICE)
    te_mx.moe.grouped_gemm(
        a, w, *lists, top_k=top_k, block_m=16, mul_weight_by=weights, bias=bias, out=out
    )
    flat = ids.flatten().long()
    rows = a.dequantize().double().repeat_interleave(top_k, 0)
    want = torch.einsum("rk,rnk->rn", rows, w.dequantize().double()[flat.clamp(0)])
    want = (want + bias[flat.clamp(0)].double()) * weights.flatten().double().unsqueeze(1)
    want[2] = 7.0
    # Codes that tiles align are rounded by up to 2^-10 of the largest scale of a tile.
    assert float((out.double() - want).norm() / want.norm()) <= 2.0**-11
    assert bool((out[2] == 7.0).all())


@pytest.mark.parametrize("tokens", [1, 20, 300])
@pytest.mark.parametrize(("hidden", "inner"), [(160, 48), (256, 256), (2880, 4320)])
def test_packed_experts(hidden, inner, tokens):
    """One copy for few rows and many; of two kinds of tiles, those with one scale and those with
    all of theirs."""
    torch.manual_seed(0)
    experts, top_k = 4, 2
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    scores, ids = torch.rand(tokens, top_k, device=DEVICE), routed(tokens, top_k, experts)
    plain = torch.randn(experts, 2 * inner, hidden, device=DEVICE) / hidden**0.5
    plain[1] *= torch.exp2(
        torch.randint(-12, 12, (2 * inner, hidden // 32), device=DEVICE)
    ).repeat_interleave(32, 1)
    plain[2, :, :32] = 0.0
    w13, w2 = (
        te_mx.quantize(plain),
        te_mx.quantize(torch.randn(experts, hidden, inner, device=DEVICE)),
    )
    packed = te_mx.moe.pack_experts(w13), te_mx.moe.pack_experts(w2)
    assert all(isinstance(one, te_mx.moe.PackedExperts) for one in packed)
    assert te_mx.moe.pack_experts(packed[0]) is packed[0]
    assert packed[0].shape == w13.shape and packed[0].fmt == "mxfp8_e4m3"
    made = te_mx.moe.fused_experts(x, *packed, scores, ids)
    want = expected(x, w13, w2, scores, ids, "silu")
    assert float((made.double() - want).norm() / want.norm()) <= 2.0**-7
    values = packed[0].dequantize()
    torch.testing.assert_close(
        values, w13.dequantize(), rtol=0.07, atol=float(values.abs().max()) * 2e-3
    )


@pytest.mark.parametrize(
    ("tokens", "activation", "dtype", "bands"),
    [
        (1, "silu", torch.bfloat16, 0),
        (9, "silu", torch.float32, 0),
        (200, "gelu_tanh", torch.float16, 0),
        (150, "silu", torch.bfloat16, 3),
        (150, "silu", torch.bfloat16, 2),
    ],
)
def test_experts_of_four_bits_run_from_one_copy(tokens, activation, dtype, bands, monkeypatch):
    """bands: that become tiles, one after the other; two where they do as they are multiplied."""
    torch.manual_seed(0)
    experts, hidden, inner, made = 5, 136, 160, []
    if bands:
        monkeypatch.setattr(tiles, "LEAST_ROWS_STANDING", 1)
        monkeypatch.setattr(grouped, "BAND_BYTES", 1)
        if bands > 2:
            monkeypatch.setattr(grouped, "MOST_IN_LOOP", 0)
        whole = grouped.gemm_rows
        monkeypatch.setattr(grouped, "gemm_rows", lambda *args: made.append(whole(*args)))
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=dtype)
    ids, scores = routed(tokens, 3, experts), torch.rand(tokens, 3, device=DEVICE)
    ids[0, 1] = -1
    w13, w2 = (
        te_mx.quantize(torch.randn(experts, *size, device=DEVICE) / 8, fmt="mxfp4")
        for size in ((2 * inner, hidden), (hidden, inner))
    )
    packed = te_mx.moe.pack_experts(w13), te_mx.moe.pack_experts(w2)
    assert all(isinstance(one, te_mx.moe.PackedExperts) for one in packed)
    assert torch.equal(packed[0].dequantize(), w13.dequantize())
    want = te_mx.moe.fused_experts(x, w13, w2, scores, ids, activation)
    made.clear()
    y = te_mx.moe.fused_experts(x, *packed, scores, ids, activation)
    assert len(made) == bands
    assert float((y.double() - want.double()).norm() / want.double().norm()) <= 2.0**-7
    a = te_mx.quantize(x.float())
    lists = te_mx.moe.align_block_size(ids, 16, experts)
    one, two = (
        te_mx.moe.grouped_gemm(a, w, *lists, block_m=16, top_k=3, out_dtype=torch.float32)
        for w in (w13, packed[0])
    )
    there = (ids >= 0).flatten()
    torch.testing.assert_close(two[there], one[there], rtol=1e-3, atol=2e-3)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["gaussian", "mixed", "nan", "rows"])
@pytest.mark.parametrize("splits", [[40, 0, 3, 90], [0, 0, 300, 0], [129, 1, 191, 17]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "fmt", "spread", "rule"),
    [
        (torch.bfloat16, "mxfp8_e4m3", 8, "rceil"),
        (torch.bfloat16, "mxfp8_e4m3", 9, "rceil"),
        (torch.float16, "mxfp8_e5m2", 3, "floor"),
    ],
)
def test_rows_of_groups_have_the_bytes_of_each_alone(dtype, fmt, spread, rule, splits, kind):
    """Gathered, and of gated activations: rows alone are quantized by a kernel of their own."""
    rows, cols, ends = sum(splits), 200, torch.tensor(splits).cumsum(0)
    groups, row = Groups(ends.cuda().int()), f"{fmt}@sm90_rows:{spread}"
    x = calls.data(50, cols, kind, dtype)
    places = torch.randint(len(x), (rows,), device=DEVICE, dtype=torch.int32)
    made = grouped.quantize_groups(QuantizeGroups(x, groups, row, "", rule), places).row
    pairs = [(made, x[places.long()])]
    h = calls.data(rows, 2 * cols, kind, dtype, 1)
    for act in ("swiglu", "geglu"):
        step = ActStep(h, None, Activation(act), dtype, False, Target(row, "", rule))
        plain = step._replace(keep=True, target=Target("", "", rule))
        values = act_quantize_2d(plain).out
        pairs.append((act_quantize_grouped(ActGroups(step, groups)).row, values))
    for got, values in pairs:
        for i, (end, size) in enumerate(zip(ends.tolist(), splits, strict=True)):
            if not size:
                continue
            alone = values[end - size : end].cpu()
            want = reference_quantize(Quantize(alone, f"{fmt}@sm90:{spread}", "", rule)).row
            own = sm90_groups.rows_of(got, end - size, end, i)
            assert torch.equal(own.codes.cpu()[:, :cols], want.codes[:, :cols])
            count = -(-size // 128)  # those that pad an odd number are nobody's
            assert torch.equal(own.scales.cpu()[:, :count], want.scales[:, :count])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [(1, 136), (3, 1416), (70, 96)], ids=str)
@pytest.mark.parametrize("act", ["swiglu", "geglu", "qgeglu"])
@pytest.mark.parametrize(
    ("dtype", "fmt"), [(torch.bfloat16, "mxfp8_e4m3"), (torch.float16, "mxfp8_e5m2")]
)
def test_activated_rows_have_the_bytes_of_what_is_kept(shape, act, dtype, fmt):
    """Codes alone are made by another kernel than codes and values."""
    rows, cols = shape
    for kind in ("gaussian", "mixed", "nan"):
        h = calls.data(rows, 2 * cols, kind, dtype)
        step = ActStep(h, None, Activation(act), dtype, True, Target(f"{fmt}@rows", "", "rceil"))
        kept, alone = act_quantize_2d(step), act_quantize_2d(step._replace(keep=False))
        for got, want in zip(alone.quantized.row[:2], kept.quantized.row[:2], strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("size", [(1, 136, 128), (2, 200, 192), (1, 1024, 512)], ids=str)
@pytest.mark.parametrize(("dtype", "act"), [(torch.bfloat16, "silu"), (torch.float16, "gelu_tanh")])
def test_slots_that_share_no_expert_have_the_bits_of_sorted_ones(size, dtype, act, monkeypatch):
    torch.manual_seed(0)
    (tokens, hidden, inner), experts = size, 24
    x = torch.randn(tokens + 8, hidden, device=DEVICE, dtype=dtype)
    w13, w2 = (
        te_mx.moe.pack_experts(
            te_mx.quantize(torch.randn(experts, *shape, device=DEVICE) / 8, fmt="mxfp4")
        )
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    ids, scores = routed(tokens + 8, 3, experts), torch.rand(tokens + 8, 3, device=DEVICE)
    ids[0, 1] = -1
    biases = [torch.randn(experts, n, device=DEVICE) for n in (2 * inner, hidden)]
    sorts = []
    real = experts_mxfp4.sort_slots
    monkeypatch.setattr(experts_mxfp4, "sort_slots", lambda *args: sorts.append(1) or real(*args))
    made = []
    for count in (tokens, tokens + 8):
        few = x[:count], w13, w2, scores[:count], ids[:count]
        made.append(te_mx.moe.fused_experts(*few, act, biases=biases)[:tokens])
        assert len(sorts) == (count > tokens)
    assert torch.equal(*made)


@pytest.mark.parametrize("x_fmt", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"])
@pytest.mark.parametrize(
    ("sizes", "n", "k"),
    [
        ((5, 0, 1, 12, 3), 64, 32),
        ((1, 130, 0, 257, 300), 320, 200),
        ((600, 2, 255, 256, 0), 200, 1056),
        ((64, 65, 128, 193, 321), 136, 392),
    ],
)
def test_rows_of_groups_times_weights_of_four_bits_that_stand(sizes, n, k, x_fmt):
    """Weights whose tiles share a scale, that are too far apart for that, with blocks of zeros, or
    nothing else; rows that share scales, or have their own; rows of no group behind the others."""
    torch.manual_seed(sum(sizes) + n + k)
    rows = sum(sizes) + 3
    w = torch.randn(5, n, k, device=DEVICE) / 16
    apart = torch.randint(-20, 1, (n, -(-k // 32)), device=DEVICE).exp2()
    w[1] *= apart.repeat_interleave(32, 1)[:, :k]
    w[3] *= (torch.rand(n, -(-k // 32), device=DEVICE) > 0.3).repeat_interleave(32, 1)[:, :k]
    w[3, :, :32] *= 2.0**-11
    w[4, : n // 2] = 0.0
    x = torch.randn(rows, k, device=DEVICE)
    x[::3] *= torch.randint(-30, 30, (len(x[::3]), 1), device=DEVICE).exp2()
    x[: rows // 4, :32] *= 2.0**-14
    bias = torch.randn(5, n, device=DEVICE)
    stack = te_mx.moe.pack_experts(te_mx.quantize(w, fmt="mxfp4")).stack
    assert stack.layout.name == "sm90_nvfp4"
    groups = Groups(torch.tensor(sizes, device=DEVICE).cumsum(0).int())
    spec = QuantizeGroups(x, groups, f"{x_fmt}@sm90_rows:8", "", "rceil")
    lhs = grouped.quantize_groups(spec).row
    values = te_mx.quantize(x, fmt=x_fmt).dequantize().double()
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.full((rows, n), torch.nan, device=DEVICE, dtype=dtype)
        grouped.gemm_rows(GroupedRows(lhs, stack, groups, bias, out, Mode()), stack)
        end = 0
        for i, size in enumerate(sizes):
            own, weight = values[end : end + size], stack.group(i).values(torch.float32).double()
            want = own @ weight.t() + bias[i].double()
            sums = own.abs() @ weight.abs().t() + bias[i].abs().double()
            room = sums * 2.0**-9 + want.abs() * torch.finfo(dtype).eps
            assert bool(((out[end : end + size].double() - want).abs() <= room).all()), i
            end += size
        assert not out[end:].any()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("x_fmt", ["e4m3", "e5m2"])
def test_pieces_of_8_16_and_32_rows_have_the_same_bits(x_fmt, fmt):
    torch.manual_seed(0)
    experts, k = 3, 160
    a = te_mx.quantize(torch.randn(90, k, device=DEVICE), fmt=x_fmt)
    w = te_mx.quantize(torch.randn(experts, 48, k, device=DEVICE), fmt=fmt)
    ids = routed(90, 2, experts)
    ids[7] = -1
    how = {"top_k": 2, "out_dtype": torch.float32, "recipe": MXFP8BlockScaling(precision="exact")}
    made = []
    for block in (8, 16, 64):
        lists = te_mx.moe.align_block_size(ids, block, experts)
        made.append(te_mx.moe.grouped_gemm(a, w, *lists, block_m=block, **how))
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    rows, own = a.dequantize().double().repeat_interleave(2, 0), ids.flatten().long()
    want = torch.einsum("rk,rnk->rn", rows, w.dequantize().double()[own.clamp(0)])
    want[14:16] = 0.0
    torch.testing.assert_close(made[0].double(), want, rtol=1e-5, atol=1e-4)
