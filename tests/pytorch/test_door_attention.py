"""DotProductAttention against the formula in fp64, with the masks of Transformer Engine's own
source."""

from __future__ import annotations

from typing import Any

import pytest
import te_source
import torch
from torch import Tensor

import te_mx.pytorch as te
from te_mx.te import attention_masks

B, H, G, D = 2, 4, 2, 8
KINDS = attention_masks.MASK_TYPES
UTILS = ("attention", "dot_product_attention", "utils.py")


def operands(queries: int, keys: int, groups: int = G) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in sbhd."""
    gen = torch.Generator().manual_seed(7)
    make = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)  # noqa: E731
    return make(queries, B, H, D), make(keys, B, groups, D), make(keys, B, groups, D)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, bias: Any = 0.0,
    softcap: float = 0.0, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """sbhd -> [s, b, heads * d], in fp64; a query that sees nothing gets zeros."""
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) / D**0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s + bias
    if hidden is not None:
        s = s.masked_fill(hidden, -torch.inf)
    e = (s - s.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink.double().view(1, -1, 1, 1) - s.amax(-1, keepdim=True)).exp()
    out = torch.where(total > 0, e / total.clamp(min=1e-300), 0.0) @ v
    return out.permute(2, 0, 1, 3).flatten(2)


def padding(lengths: list[int], size: int) -> Tensor:
    """True where hidden, [b, 1, 1, size]."""
    return (torch.arange(size) >= torch.tensor(lengths)[:, None]).view(len(lengths), 1, 1, size)


@pytest.mark.parametrize("window", [None, (3, 0), (2, 1)])
@pytest.mark.parametrize("bottom_right", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*looks ahead")
@pytest.mark.filterwarnings("ignore:window_size should be")
def test_masks_are_those_of_transformer_engine(kind, bottom_right, window):
    theirs = te_source.functions(*UTILS, names=("get_full_mask", "check_set_window_size"))
    queries, keys = 5, 7
    q, k, v = operands(queries, keys)
    mask: Any = None
    if "padding" in kind:
        mask = (padding([4, 5], queries), padding([7, 3], keys))
    elif kind == "arbitrary":
        mask = torch.rand(B, 1, queries, keys, generator=torch.Generator().manual_seed(1)) < 0.3
    layer = te.DotProductAttention(H, D, G, attn_mask_type=kind, attention_type="cross")
    out = layer(q, k, v, mask, window_size=window, bottom_right_diagonal=bottom_right)
    # No bound: theirs takes the number of queries or keys for one, which hides keys where there
    # are more of them than of the others.
    size = [100 if n == -1 else n for n in theirs["check_set_window_size"](kind, window)]
    if "causal" in kind:
        aligned = kind.endswith("bottom_right")
    else:
        aligned = True if bottom_right is None else bottom_right
    _, hidden, _, _ = theirs["get_full_mask"](
        queries, keys, kind, mask, size, "cross", bottom_right_alignment=aligned
    )
    expected = oracle(q, k, v, hidden)
    assert (out - expected).abs().max() < 1e-12
    if kind == "padding":
        assert not out[4:, 0].any() and out[:4, 0].abs().amin() > 0


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("kind", ["causal", "no_mask", "padding"])
@pytest.mark.parametrize("groups", [1, G, H])
def test_layouts_heads_and_gradients(layout, kind, groups):
    q, k, v = (x.requires_grad_() for x in operands(6, 6, groups))
    mask = padding([6, 4], 6) if kind == "padding" else None
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1) if kind == "causal" else None
    if mask is not None:
        hidden = mask | mask.transpose(-1, -2)
    expected = oracle(q, k, v, hidden)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    given = [x if layout == "sbhd" else x.transpose(0, 1) for x in (q, k, v)]
    layer = te.DotProductAttention(H, D, groups, qkv_format=layout, attn_mask_type=kind)
    for checkpoint in (False, True):
        out = layer(*given, mask, checkpoint_core_attention=checkpoint)
        out = out if layout == "sbhd" else out.transpose(0, 1)
        assert (out - expected).abs().max() < 1e-12
        got = torch.autograd.grad(out, (q, k, v), grad)
        assert all((a - b).abs().max() < 1e-11 for a, b in zip(got, wanted, strict=True))


def test_lengths_stand_for_a_padding_mask():
    q, k, v = operands(6, 6)
    layer = te.DotProductAttention(H, D, G, attn_mask_type="padding_causal")
    steps = torch.tensor([0, 6, 10], dtype=torch.int32)
    with_lengths = layer(q, k, v, cu_seqlens_q=steps)
    assert torch.equal(with_lengths, layer(q, k, v, padding([6, 4], 6)))


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("padded", [False, True])
def test_packed_sequences_are_each_on_their_own(kind, padded):
    lengths, other = [3, 0, 5], [4, 2, 5]
    gap = 2 if padded else 0
    steps = lambda sizes: torch.tensor([0, *torch.tensor(sizes).cumsum(0)])  # noqa: E731
    starts = {
        f"cu_seqlens_{side}_padded": steps([n + gap for n in sizes])
        for side, sizes in (("q", lengths), ("kv", other))
    }
    total_q, total_k = (int(s[-1]) for s in starts.values())
    gen = torch.Generator().manual_seed(3)
    make = lambda n, h: torch.randn(n, h, D, generator=gen, dtype=torch.float64)  # noqa: E731
    q, k, v = make(total_q, H), make(total_k, G), make(total_k, G)
    layer = te.DotProductAttention(H, D, G, qkv_format="thd", attn_mask_type=kind)
    given = starts if padded else {}
    out = layer(q, k, v, cu_seqlens_q=steps(lengths), cu_seqlens_kv=steps(other), **given)
    alone = te.DotProductAttention(H, D, G, attn_mask_type=kind.removeprefix("padding_")
                                   if "_" in kind else "no_mask")  # fmt: skip
    of_q, of_k = starts.values()
    expected = torch.zeros(total_q, H * D, dtype=torch.float64)
    for i in (0, 2):
        rows = slice(int(of_q[i]), int(of_q[i]) + lengths[i])
        cols = slice(int(of_k[i]), int(of_k[i]) + other[i])
        one = alone(q[rows].unsqueeze(1), k[cols].unsqueeze(1), v[cols].unsqueeze(1))
        expected[rows] = one.squeeze(1)
    assert (out - expected).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias", "alibi"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
def test_biases(kind, mask):
    q, k, v = operands(5, 7)
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(3 if "bottom" in mask else 1)
    bias = torch.randn(1, H, 5, 7, dtype=torch.float64, requires_grad=True)
    slopes = None
    if kind == "alibi":
        theirs = te_source.functions(*UTILS, names=("get_alibi",))["get_alibi"]
        cache = {"_alibi_slopes_require_update": True, "_alibi_bias_require_update": True}
        slopes, bias = theirs(cache, H, 5, 7, bottom_right_alignment=mask != "causal")
        layer = te.DotProductAttention(H, D, G, attn_mask_type=mask)
        own = layer(q, k, v, core_attention_bias_type=kind)
        assert torch.equal(own, layer(q, k, v, core_attention_bias_type=kind, alibi_slopes=slopes))
        given = {}
    else:
        given = {"core_attention_bias": bias}
    out = te.DotProductAttention(H, D, G, attn_mask_type=mask)(
        q, k, v, core_attention_bias_type=kind, **given
    )
    added = bias / D**0.5 if kind == "pre_scale_bias" else bias
    expected = oracle(q, k, v, None if mask == "no_mask" else hidden, added)
    assert (out - expected).abs().max() < 1e-12
    if given:
        wanted, got = (torch.autograd.grad(one.sum(), bias)[0] for one in (expected, out))
        assert (got - wanted).abs().max() < 1e-12


def test_softcap_sinks_and_the_largest_score():
    q, k, v = operands(5, 5)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    cases = {"vanilla": None, "off-by-one": torch.zeros(H), "learnable": sink}
    for softmax, extra in cases.items():
        layer = te.DotProductAttention(
            H, D, G, softcap=2.0, softmax_type=softmax, return_max_logit=True
        )
        if softmax == "learnable":
            assert list(layer.state_dict()) == ["softmax_offset"]
            older = {"softmax_offset": sink.view(1, -1, 1, 1)}  # the shape in older versions
            layer.load_state_dict(older)
            assert torch.equal(layer.softmax_offset, sink)
        elif extra is None:
            assert layer.softmax_offset is None
        else:
            assert not layer.state_dict() and torch.equal(layer.softmax_offset, extra.float())
        out, largest = layer(q, k, v)
        expected = oracle(q, k, v, hidden, softcap=2.0, sink=extra)
        assert (out - expected).abs().max() < 1e-6  # fp32
        scores = torch.einsum("sbhd,tbhd->hbst", q, k.repeat_interleave(2, 2)) / D**0.5
        capped = (2 * torch.tanh(scores / 2)).masked_fill(hidden, -torch.inf)
        assert (largest - capped.amax((1, 2, 3))).abs().max() < 1e-6
        narrow, of_narrow = layer(*(x.bfloat16() for x in (q, k, v)))
        assert narrow.dtype == of_narrow.dtype == torch.bfloat16
    plain = te.DotProductAttention(H, D, G)(q, k, v)
    uncapped = te.DotProductAttention(H, D, G, softcap=1e4)(q, k, v, softcap=0.0)
    assert torch.equal(plain, uncapped)


def test_the_largest_score_is_one_that_is_seen():
    """Not one of padding, whose outputs are zeros."""
    q, k, v = operands(5, 5)
    lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
    layer = te.DotProductAttention(H, D, G, attn_mask_type="padding", return_max_logit=True)
    largest = layer(q, k, v, cu_seqlens_q=lengths)[1]
    q[3:, 0] *= 1e3
    k[3:, 0] *= 1e3
    assert torch.equal(layer(q, k, v, cu_seqlens_q=lengths)[1], largest)
    assert (
        layer(q[:0], k, v, cu_seqlens_q=torch.tensor([0, 0, 0]), cu_seqlens_kv=lengths)[1]
        .eq(-torch.inf)
        .all()
    )


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias", "alibi"])
def test_packed_sequences_have_biases_and_a_largest_score(kind):
    """As the batch with padding has; the bias of each sequence, or one for all."""
    q, k, v = operands(5, 5)
    lengths, steps = [3, 5], torch.tensor([0, 3, 8], dtype=torch.int32)
    how = {"attn_mask_type": "padding_causal", "return_max_logit": True}
    layer = te.DotProductAttention(H, D, G, **how)
    packed = [torch.cat([x[:n, i] for i, n in enumerate(lengths)]) for x in (q, k, v)]
    gen = torch.Generator().manual_seed(5)
    for shape in ((B, H, 5, 5), (1, 1, 5, 5), (H, 1, 5), (5, 5), (B, 1, 6, 9)):
        given: dict[str, Any]
        if kind == "alibi":
            given = {"alibi_slopes": torch.rand(B, H, generator=gen)}
        else:
            bias = torch.randn(shape, generator=gen, dtype=torch.float64, requires_grad=True)
            given = {"core_attention_bias": bias}
        given |= {"cu_seqlens_q": steps, "core_attention_bias_type": kind}
        out, largest = layer(*packed, qkv_format="thd", **given)
        if kind != "alibi":
            given["core_attention_bias"] = bias[..., :5, :5]
        expected, same = layer(q, k, v, **given)
        parts = torch.cat([expected[:n, i] for i, n in enumerate(lengths)])
        assert (out - parts).abs().max() < 1e-6 and (largest - same).abs().max() < 1e-6
        if kind != "alibi":
            grads = [torch.autograd.grad(one.sum(), bias)[0] for one in (out, parts)]
            assert (grads[0] - grads[1]).abs().max() < 1e-6


def test_biases_that_do_not_reach_every_packed_sequence_are_refused():
    q, k, v = (x[:, 0] for x in operands(8, 8))
    steps = torch.tensor([0, 3, 8], dtype=torch.int32)
    layer = te.DotProductAttention(H, D, G, attn_mask_type="padding", qkv_format="thd")
    for shape in ((H, 4, 5), (H, 5, 4), (3, 1, 5, 5), (2, 5, 5)):
        with pytest.raises(ValueError, match=r"core_attention_bias must be .* \(2, 4, 5, 5\)"):
            layer(q, k, v, cu_seqlens_q=steps, core_attention_bias_type="post_scale_bias",
                  core_attention_bias=torch.zeros(shape, dtype=torch.float64))  # fmt: skip
    with pytest.raises(ValueError, match=r"alibi_slopes must be \[4\] or \[2, 4\]"):
        layer(q, k, v, cu_seqlens_q=steps, core_attention_bias_type="alibi",
              alibi_slopes=torch.zeros(3, H))  # fmt: skip


def test_no_tokens():
    for shape in ((0, 2, 32), (3, 0, 32)):
        x = torch.randn(shape, requires_grad=True)
        y = te.TransformerLayer(32, 64, 4)(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape
    layer = te.DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding")
    for sequences in (0, 2):
        q = torch.randn(0, H, D, requires_grad=True)
        steps = torch.zeros(1 + sequences, dtype=torch.int32)
        out = layer(q, q, q, cu_seqlens_q=steps)
        out.sum().backward()
        assert out.shape == (0, H * D) and q.grad.shape == q.shape


def test_dropout_is_of_training_alone():
    q, k, v = operands(5, 5)
    layer = te.DotProductAttention(H, D, G, attention_dropout=0.5)
    assert not torch.equal(layer(q, k, v), layer(q, k, v))
    layer.eval()
    assert torch.equal(layer(q, k, v), layer(q, k, v))


def test_extra_state_of_a_checkpoint_is_ignored():
    layer = te.DotProductAttention(H, D)
    layer.load_state_dict({"_extra_state": torch.empty(0, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict({"other": torch.empty(0)})


def test_windows_that_say_something_else_warn():
    with pytest.warns(UserWarning, match="looks ahead"):
        te.DotProductAttention(H, D, window_size=(4, 2))
    with pytest.warns(UserWarning, match="means no window"):
        te.DotProductAttention(H, D, attn_mask_type="no_mask", window_size=(-1, 0))


@pytest.mark.parametrize("kind", ["no_mask", "causal", "padding"])
def test_it_compiles(kind):
    layer = te.DotProductAttention(H, D, G, attn_mask_type=kind)
    q, k, v = (x.float() for x in operands(6, 6))
    mask = padding([6, 4], 6) if kind == "padding" else None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v, mask), layer(q, k, v, mask), atol=1e-6)
