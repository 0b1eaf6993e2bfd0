"""te_mx.moe against the conformance set: the lists, the products that read them, whole mixtures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from kernel_calls import INTERPRETED
from moe import ROUTINGS, Routed, aligned, in_turns, poisoned, product

import te_mx

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
STEPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_SOME = "one token", "no power of two", "slots of no expert", "nothing here"
every_routing = pytest.mark.parametrize("routing", _SOME if INTERPRETED else list(ROUTINGS))


def quantized(*shape: int, fmt: str = "e4m3", seed: int = 0) -> te_mx.MXTensor:
    generator = torch.Generator().manual_seed(seed)
    return te_mx.quantize(torch.randn(shape, generator=generator), fmt=fmt)


@every_routing
def test_lists_are_those_of_the_oracle(routing):
    r = ROUTINGS[routing]
    for ids in (r.topk_ids, r.topk_ids.long(), r.topk_ids.t().contiguous().t()):
        made = te_mx.moe.align_block_size(ids, r.block_m, r.experts, r.expert_map)
        for mine, theirs in zip(made, aligned(r), strict=True):
            assert mine.dtype == torch.int32 and torch.equal(mine, theirs)


def test_lists_of_nothing():
    ids, experts, count = te_mx.moe.align_block_size(torch.empty(0, 2, dtype=torch.int32), 8, 4)
    assert ids.numel() == 0 and experts.numel() == 0 and count.tolist() == [0]


@every_routing
def test_lists_of_whole_blocks(routing):
    r = ROUTINGS[routing]
    given = (r.topk_ids, r.block_m, r.experts, r.expert_map)
    plain = te_mx.moe.align_block_size(*given)
    padded = te_mx.moe.align_block_size(*given, pad_sorted_ids=True)
    size = len(plain.sorted_token_ids)
    assert len(padded.sorted_token_ids) == -(-size // r.block_m) * r.block_m
    assert torch.equal(padded.sorted_token_ids[:size], plain.sorted_token_ids)
    assert padded.sorted_token_ids[size:].eq(r.topk_ids.numel()).all()
    for mine, theirs in zip(padded[1:], plain[1:], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("most", [0, 1, 7, 8, 19])
@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("counts", [[0.5, 0, 1, 0.3], [0, 0], [1], []])
def test_lists_of_tokens_that_lie_by_expert(counts, block, most):
    """Against a loop; experts are the batches."""
    tokens = torch.tensor([int(most * share) for share in counts], dtype=torch.int32)
    experts = len(tokens)
    size = experts * (-(-most // block) * block)
    ids, owners = [], []
    for e, count in enumerate(tokens.tolist()):
        filled = -(-count // block) * block
        ids += [e * most + i if i < count else experts * most for i in range(filled)]
        owners += [e] * (filled // block)
    wanted = (
        ids + [experts * most] * (size - len(ids)),
        owners + [-1] * (size // block - len(owners)),
        [len(ids)],
    )
    for given in (tokens, tokens.long()):
        made = te_mx.moe.batched_align_block_size(most, block, given)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in made)
        assert tuple(t.tolist() for t in made) == wanted
    with pytest.raises(ValueError, match="expert_num_tokens"):
        te_mx.moe.batched_align_block_size(most, block, torch.tensor([most + 1]))


def test_products_of_tokens_that_lie_by_expert():
    counts, most, block, n = [3, 0, 5], 6, 4, 40
    a, w = quantized(3 * most, 64), quantized(3, n, 64, seed=1)
    lists = te_mx.moe.batched_align_block_size(most, block, torch.tensor(counts))
    made = te_mx.moe.grouped_gemm(
        a, w, *lists, top_k=1, block_m=block, a_div=1, out_dtype=torch.float32,
        out=torch.zeros(3 * most, n),
    ).view(3, most, n)  # fmt: skip
    tokens, weights = a.dequantize().view(3, most, 64), w.dequantize()
    for e, count in enumerate(counts):
        torch.testing.assert_close(made[e, :count], tokens[e, :count] @ weights[e].T)
        assert not made[e, count:].any()


def check(r: Routed, lists, a_div: int, out_dtype, fmt: str, k: int, *, extras: bool) -> None:
    n = 40
    a = quantized(r.routed // a_div, k, seed=1)
    w = quantized(r.local, n, k, fmt=fmt, seed=2)
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(r.routed, generator=generator) if extras else None
    bias = torch.randn(r.local, n, generator=generator) if extras else None
    out = torch.full((r.routed, n), torch.nan, dtype=out_dtype)
    made = te_mx.moe.grouped_gemm(
        a, w, *lists, top_k=r.topk_ids.shape[1], block_m=r.block_m, out_dtype=out_dtype,
        mul_weight_by=weights, a_div=a_div, bias=bias, out=out,
    )  # fmt: skip
    assert made is out
    want, magnitude, hit = product(r, a.dequantize(), w.dequantize(), a_div, weights, bias)
    bound = (k + 4) * 2.0**-24 * magnitude + want.abs() * STEPS[out_dtype] + 2.0**-150
    assert bool(((out.double() - want).abs() <= bound)[hit].all())
    assert bool(out[~hit].isnan().all())  # as they were
    fresh = te_mx.moe.grouped_gemm(
        a, w, *lists, top_k=r.topk_ids.shape[1], block_m=r.block_m, out_dtype=out_dtype,
        mul_weight_by=weights, a_div=a_div, bias=bias,
    )  # fmt: skip
    assert torch.equal(fresh[hit], out[hit]) and not bool(fresh[~hit].any())


@every_routing
@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4"])
def test_products_of_the_oracle(routing, fmt, isa):
    r = ROUTINGS[routing]
    top_k, lists = r.topk_ids.shape[1], aligned(r)
    check(r, lists, top_k, torch.bfloat16, fmt, 96, extras=False)
    check(r, lists, 1, torch.float32, fmt, 70, extras=True)
    check(r, poisoned(lists, r.block_m, 3), top_k, torch.float16, fmt, 64, extras=True)
    check(r, in_turns(lists, r), 1, torch.float32, fmt, 32, extras=False)


@every_routing
def test_a_slot_as_a_block_of_its_own(routing):
    r = ROUTINGS[routing]
    experts = torch.tensor([r.expert_of(i) for i in range(r.routed)], dtype=torch.int32)
    count = torch.tensor([r.routed * r.block_m], dtype=torch.int32)
    check(r, (None, experts, count), r.topk_ids.shape[1], torch.float32, "e4m3", 64, extras=True)


@pytest.mark.filterwarnings("ignore:te_mx runs moe_gemm:te_mx.FallbackWarning")
def test_rows_that_stand_at_several_positions_are_computed_all_the_same():
    """Lists that no alignment makes: more positions than there are routed rows."""
    a, w = quantized(2, 64), quantized(2, 40, 64, seed=1)
    ids, experts, count = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]), torch.tensor([0, 1]), 8
    made = te_mx.moe.grouped_gemm(
        a, w, ids, experts, torch.tensor([count]), top_k=1, block_m=4, out_dtype=torch.float32
    )
    want = torch.stack([w.dequantize()[i] @ a.dequantize()[i] for i in (0, 1)])
    torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-5)


def test_a_routed_row_has_the_bits_of_a_plain_product():
    r = ROUTINGS["many tokens"]
    a, w = quantized(65, 96), quantized(6, 40, 96, fmt="e5m2", seed=1)
    made = te_mx.moe.grouped_gemm(
        a, w, *aligned(r), top_k=4, block_m=r.block_m, out_dtype=torch.float32
    )
    values = w.dequantize()
    for row in (0, 77, 259):
        own = te_mx.quantize(values[r.expert_of(row)], fmt="e5m2")
        x = te_mx.quantize(a.dequantize()[row // 4 : row // 4 + 1])
        alone = te_mx.gemm(own, x, "TN", out_dtype=torch.float32).out[0]
        torch.testing.assert_close(made[row], alone, rtol=1e-5, atol=1e-5)


def test_plain_tokens_are_quantized_by_the_recipe():
    r = ROUTINGS["no power of two"]
    x, w = torch.randn(13, 64), quantized(7, 40, 64)
    call = {"top_k": 3, "block_m": r.block_m, "out_dtype": torch.float32}
    for fmt, recipe in (("e4m3", None), ("mxfp4", te_mx.recipe.MXFP4BlockScaling())):
        made = te_mx.moe.grouped_gemm(x, w, *aligned(r), **call, recipe=recipe)
        given = te_mx.moe.grouped_gemm(te_mx.quantize(x, fmt=fmt), w, *aligned(r), **call)
        assert torch.equal(made, given)


# ----------------------------------------------------------------------------------- whole mixtures
def mixture(
    x: Tensor, w13: Tensor, w2: Tensor, scores: Tensor, r: Routed, *, act: str, interleaved: bool,
    biases: tuple[Tensor | None, Tensor | None], quantizes: bool = True,
) -> Tensor:  # fmt: skip
    """fused_experts in steps, token by token; weights are values, x was quantized if it is."""
    out = torch.zeros(len(x), w2.shape[1])
    for row in range(r.routed):
        e, token = r.expert_of(row), row // r.topk_ids.shape[1]
        if e < 0:
            continue
        h = w13[e] @ x[token] + (0 if biases[0] is None else biases[0][e])
        h = h.to(torch.bfloat16).float()
        gate, up = (h[::2], h[1::2]) if interleaved else h.chunk(2)
        if act == "swigluoai":
            gate = gate.clamp(max=7.0)
            z = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)
        elif act == "gelu_tanh":
            z = torch.nn.functional.gelu(gate, approximate="tanh") * up
        else:
            z = torch.nn.functional.silu(gate) * up
        z = z.to(torch.bfloat16)
        z = te_mx.quantize(z).dequantize() if quantizes else z.float()
        y = w2[e] @ z + (0 if biases[1] is None else biases[1][e])
        out[token] += scores.reshape(-1)[row] * y
    return out


@every_routing
@pytest.mark.parametrize(
    ("act", "interleaved", "with_bias"),
    [("silu", False, False), ("swigluoai", True, True), ("gelu_tanh", False, True)],
)
def test_a_mixture_is_its_steps(routing, act, interleaved, with_bias):
    r = ROUTINGS[routing]
    torch.manual_seed(4)
    tokens, hidden, inner = len(r.topk_ids), 64, 48
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    w13 = te_mx.quantize(torch.randn(r.local, 2 * inner, hidden) / 4, fmt="mxfp4")
    w2 = te_mx.quantize(torch.randn(r.local, hidden, inner) / 4)
    scores = torch.rand(r.topk_ids.shape)
    biases = (None, None)
    if with_bias:
        biases = torch.randn(r.local, 2 * inner), torch.randn(r.local, hidden)
    made = te_mx.moe.fused_experts(
        x, w13, w2, scores, r.topk_ids, act, interleaved=interleaved, expert_map=r.expert_map,
        biases=biases if with_bias else None,
    )  # fmt: skip
    want = mixture(
        te_mx.quantize(x).dequantize(), w13.dequantize(), w2.dequantize(), scores, r, act=act,
        interleaved=interleaved, biases=biases,
    )  # fmt: skip
    assert made.dtype == x.dtype and made.shape == x.shape
    # A sum of h may round the other way in bf16, and then a code of MXFP8.
    assert float((made.float() - want).norm()) <= 2.0**-6 * float(want.norm()) + 2.0**-20


@every_routing
@pytest.mark.parametrize(
    ("fmt", "act", "interleaved"),
    [("nvfp4", "silu", False), ("nvfp4", "swigluoai", True), ("mxfp4", "gelu_tanh", True),
     ("e4m3", "silu", False)],
)  # fmt: skip
def test_a_mixture_of_tokens_as_they_are(routing, fmt, act, interleaved):
    r = ROUTINGS[routing]
    torch.manual_seed(5)
    hidden, inner = 64, 48
    x = torch.randn(len(r.topk_ids), hidden, dtype=torch.bfloat16)
    plain = torch.randn(r.local, 2 * inner, hidden) / 4, torch.randn(r.local, hidden, inner) / 4
    given = [te_mx.quantize(one, fmt=fmt) for one in plain]
    held = [te_mx.moe.pack_experts(one, activations="bf16") for one in given]
    scores, biases = torch.rand(r.topk_ids.shape), (torch.randn(r.local, 2 * inner), None)
    made = te_mx.moe.fused_experts(
        x, *held, scores, r.topk_ids, act, interleaved=interleaved, expert_map=r.expert_map,
        biases=biases,
    )  # fmt: skip
    values = [one.dequantize() for one in given]
    assert all(torch.equal(one.dequantize(), w) for one, w in zip(held, values, strict=True))
    want = mixture(
        x.float(), *values, scores, r, act=act, interleaved=interleaved, biases=biases,
        quantizes=False,
    )  # fmt: skip
    assert made.dtype == x.dtype and made.shape == x.shape
    # A sum of h, and what is activated, may round the other way in bf16.
    assert float((made.float() - want).norm()) <= 2.0**-7 * float(want.norm()) + 2.0**-20


def test_tokens_as_they_are_belong_to_whole_mixtures():
    w13, w2 = quantized(4, 64, 32, fmt="nvfp4"), quantized(4, 32, 32, fmt="nvfp4")
    held = te_mx.moe.pack_experts(w13, activations="bf16")
    assert te_mx.moe.pack_experts(held, activations="bf16") is held and "weight_only" in repr(held)
    with pytest.raises(ValueError, match="packed already"):
        te_mx.moe.pack_experts(held)
    with pytest.raises(ValueError, match="activations must be"):
        te_mx.moe.pack_experts(w13, activations="mxfp8")
    x, ids, scores = torch.randn(2, 32), torch.zeros(2, 1).int(), torch.ones(2, 1)
    for pair in ((held, w2), (w13, te_mx.moe.pack_experts(w2, activations="bf16"))):
        with pytest.raises(ValueError, match="activations of pack_experts"):
            te_mx.moe.fused_experts(x, *pair, scores, ids)
    recipe = te_mx.recipe.MXFP8BlockScaling(precision="invariant")
    with pytest.raises(ValueError, match="precision 'invariant' quantizes tokens"):
        te_mx.moe.fused_experts(x, held, held, scores, ids, recipe=recipe)
    with pytest.raises(ValueError, match="activations of pack_experts"):
        te_mx.moe.grouped_gemm(x, held, *te_mx.moe.align_block_size(ids, 8, 4), top_k=1, block_m=8)


def test_a_mixture_of_no_tokens():
    w13, w2 = quantized(4, 64, 32), quantized(4, 40, 32)
    none = torch.empty(0, 2)
    made = te_mx.moe.fused_experts(torch.empty(0, 32), w13, w2, none, none.int())
    assert made.shape == (0, 40)


def test_a_compiled_mixture_has_the_bits_of_an_eager_one():
    r = ROUTINGS["no power of two"]
    x, scores = torch.randn(13, 64), torch.rand(13, 3)
    w13, w2 = quantized(7, 96, 64, fmt="mxfp4"), quantized(7, 64, 48)

    def mixture(x: Tensor, ids: Tensor) -> Tensor:
        return te_mx.moe.fused_experts(x, w13, w2, scores, ids, "swigluoai", interleaved=True)

    compiled = torch.compile(mixture, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, r.topk_ids), mixture(x, r.topk_ids))


def test_the_ops_pass_torchs_own_checks():
    r = ROUTINGS["some experts elsewhere"]
    lists = aligned(r)
    x, w = quantized(17, 64).operand("rowwise"), quantized(4, 40, 64).operand("rowwise")
    codes, scales = w.codes.view(4, 40, 64), w.scales.view(4, 40, 2)
    args = (
        *x[:5], codes, scales, None, w.spec, 4, 40, *lists, r.block_m, 4, 4, None, torch.rand(68),
        torch.zeros(68, 40), -1, "adaptive", 8,
    )  # fmt: skip
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.te_mx.moe_gemm.default, args, test_utils=checks)
    align = (r.topk_ids.reshape(-1), r.block_m, r.experts, r.expert_map)
    torch.library.opcheck(torch.ops.te_mx.moe_align.default, align, test_utils=checks)
