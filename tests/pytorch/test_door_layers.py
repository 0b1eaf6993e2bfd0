"""MultiheadAttention and TransformerLayer: what they compute, and the names of what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import te_source
import torch
from torch.nn import functional as F

import te_mx
import te_mx.pytorch as te
from te_mx.te import attention_checks

HIDDEN, FFN, HEADS, S, B = 32, 48, 4, 6, 2

# Of a decoder of Transformer Engine, with all that is optional.
SPLIT = [f"{name}_{kind}" for kind in ("weight", "bias") for name in ("query", "key", "value")]
NAMES = {
    *(f"self_attention.layernorm_qkv.{n}" for n in
      ("layer_norm_weight", "layer_norm_bias", *SPLIT)),
    *(f"self_attention.proj.{n}" for n in ("weight", "bias")),
    *(f"inter_attention.layernorm_query.{n}" for n in
      ("layer_norm_weight", "layer_norm_bias", "query_weight", "query_bias")),
    *(f"inter_attention.key_value.{a}_{b}" for a in ("key", "value") for b in ("weight", "bias")),
    *(f"inter_attention.proj.{n}" for n in ("weight", "bias")),
    *(f"layernorm_mlp.{n}" for n in
      ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")),
    *(f"{a}_attention.{b}_norm.weight" for a in ("self", "inter") for b in "qk"),
}  # fmt: skip


def layer(**how: Any) -> te.TransformerLayer:
    torch.manual_seed(0)
    made = te.TransformerLayer(HIDDEN, FFN, HEADS, **how)
    with torch.no_grad():  # biases and norms that show
        for name, parameter in made.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.eval()


def test_names_are_transformer_engines_and_its_checkpoints_load():
    made = layer(layer_type="decoder", qk_norm_type="RMSNorm")
    assert set(made.state_dict()) == NAMES
    extra = {
        f"{name}._extra_state": torch.empty(0, dtype=torch.uint8)
        for name, module in made.named_modules()
        if name.rpartition(".")[2] not in ("", "self_attention", "inter_attention")
    }
    made.load_state_dict({**made.state_dict(), **extra}, strict=True)
    fused = layer(fuse_qkv_params=True, output_layernorm=True, bias=False)
    assert {"self_attention.qkv.weight", "layernorm.weight", "layernorm.bias"} <= set(
        fused.state_dict()
    )


def attention(x: torch.Tensor, module: Any, kv: torch.Tensor | None = None) -> torch.Tensor:
    """An attention block of a decoder, written out."""
    norm = module.layernorm_qkv if kv is None else module.layernorm_query
    z = F.layer_norm(x, (HIDDEN,), norm.layer_norm_weight, norm.layer_norm_bias)
    if kv is None:
        q, k, v = (
            F.linear(z, getattr(norm, f"{n}_weight"), getattr(norm, f"{n}_bias"))
            for n in ("query", "key", "value")
        )
    else:
        q = F.linear(z, norm.query_weight, norm.query_bias)
        both = module.key_value
        k, v = (
            F.linear(kv, getattr(both, f"{n}_weight"), getattr(both, f"{n}_bias"))
            for n in ("key", "value")
        )
    q, k, v = (t.unflatten(-1, (-1, HIDDEN // HEADS)).permute(1, 2, 0, 3) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=kv is None, enable_gqa=True)
    out = out.permute(2, 0, 1, 3).flatten(2)
    return F.linear(out, module.proj.weight, module.proj.bias)


def mlp(x: torch.Tensor, module: Any) -> torch.Tensor:
    z = F.layer_norm(x, (HIDDEN,), module.layer_norm_weight, module.layer_norm_bias)
    h = F.gelu(F.linear(z, module.fc1_weight, module.fc1_bias), approximate="tanh")
    return F.linear(h, module.fc2_weight, module.fc2_bias)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "parallel", "post", "output"])
@pytest.mark.parametrize("groups", [None, 2])
def test_a_layer_is_its_parts(kind, groups):
    x, memory = torch.randn(S, B, HIDDEN), torch.randn(S + 3, B, HIDDEN)
    how: dict[str, Any] = {"num_gqa_groups": groups}
    how |= {"parallel": {"parallel_attention_mlp": True}, "decoder": {"layer_type": "decoder"},
            "post": {"apply_residual_connection_post_layernorm": True},
            "output": {"output_layernorm": True}}.get(kind, {})  # fmt: skip
    made = layer(**how)
    own, last = made.self_attention, made.layernorm_mlp
    if kind == "output":
        q, k, v = (
            F.linear(x, getattr(own.qkv, f"{n}_weight"), getattr(own.qkv, f"{n}_bias"))
            for n in ("query", "key", "value")
        )
        heads = (t.unflatten(-1, (-1, HIDDEN // HEADS)) for t in (q, k, v))
        h = x + F.linear(own.core_attention(*heads), own.proj.weight, own.proj.bias)
        norm = made.layernorm
        expected = F.layer_norm(h + mlp(h, last), (HIDDEN,), norm.weight, norm.bias)
    elif kind == "parallel":
        expected = x + attention(x, own) + mlp(x, last)
    elif kind == "post":
        z = own.layernorm_qkv
        h = F.layer_norm(x, (HIDDEN,), z.layer_norm_weight, z.layer_norm_bias) + attention(x, own)
        base = F.layer_norm(h, (HIDDEN,), last.layer_norm_weight, last.layer_norm_bias)
        expected = base + mlp(h, last)
    else:
        h = x + attention(x, own)
        h = h + attention(h, made.inter_attention, memory) if kind == "decoder" else h
        expected = h + mlp(h, last)
    given = {"encoder_output": memory} if kind == "decoder" else {}
    assert (made(x, **given) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_interleaved_and_split_weights_are_the_same_rows(groups):
    """A fused weight holds, group by group, the rows of its queries, its key and its value."""
    width, each = HIDDEN // HEADS, HEADS // groups
    split = te.MultiheadAttention(HIDDEN, HEADS, num_gqa_groups=groups).eval()
    x, other = torch.randn(S, B, HIDDEN), torch.randn(S, B, HIDDEN)
    parts = [getattr(split.qkv, name).detach() for name in SPLIT]
    for interleaved in (False, True):
        fused = te.MultiheadAttention(
            HIDDEN, HEADS, num_gqa_groups=groups, fuse_qkv_params=True,
            qkv_weight_interleaved=interleaved,
        ).eval()  # fmt: skip
        for kind, (q, k, v) in (("weight", parts[:3]), ("bias", parts[3:])):
            if interleaved:
                rows = [t.unflatten(0, (groups, -1)) for t in (q, k, v)]
                assert rows[0].shape[1] == each * width and rows[1].shape[1] == width
                whole = torch.cat(rows, 1).flatten(0, 1)
            else:
                whole = torch.cat((q, k, v))
            getattr(fused.qkv, kind).data.copy_(whole)
        fused.proj.load_state_dict(split.proj.state_dict())
        assert (fused(x) - split(x)).abs().max() < 1e-6
    cross = te.MultiheadAttention(HIDDEN, HEADS, num_gqa_groups=groups, attention_type="cross")
    both = te.MultiheadAttention(
        HIDDEN, HEADS, num_gqa_groups=groups, attention_type="cross", fuse_qkv_params=True
    )
    key, value = cross.key_value.key_weight, cross.key_value.value_weight
    pairs = [t.detach().unflatten(0, (groups, -1)) for t in (key, value)]
    both.key_value.weight.data.copy_(torch.cat(pairs, 1).flatten(0, 1))
    both.query_layer.load_state_dict(cross.query_layer.state_dict())
    both.proj.load_state_dict(cross.proj.state_dict())
    for module in (cross, both):
        module.eval()
    assert (both(x, encoder_output=other) - cross(x, encoder_output=other)).abs().max() < 1e-6


def test_layouts_of_the_input_are_the_same_layer():
    rotary = te.RotaryPositionEmbedding(HIDDEN // HEADS)(S)
    state, x = layer().state_dict(), torch.randn(S, B, HIDDEN)
    outputs = []
    for layout in ("sbhd", "bshd", "thd"):
        made = layer(attn_input_format=layout)
        made.load_state_dict(state)
        if layout == "sbhd":
            outputs.append(made(x, rotary_pos_emb=rotary))
        elif layout == "bshd":
            outputs.append(made(x.transpose(0, 1), rotary_pos_emb=rotary).transpose(0, 1))
        else:
            packed = x.transpose(0, 1).reshape(-1, HIDDEN)
            steps = torch.arange(B + 1, dtype=torch.int32) * S
            out = made(packed, self_attn_mask_type="padding_causal", rotary_pos_emb=rotary,
                       cu_seqlens_q=steps, cu_seqlens_kv=steps)  # fmt: skip
            outputs.append(out.view(B, S, HIDDEN).transpose(0, 1))
    assert all((out - outputs[0]).abs().max() < 1e-5 for out in outputs)
    assert (outputs[0] - layer()(x)).abs().max() > 1e-3  # the angles count


def test_dropout_and_drop_path_are_of_training_alone():
    x = torch.randn(S, B, HIDDEN)
    made = layer(hidden_dropout=0.5, attention_dropout=0.0, drop_path_rate=0.5)
    assert torch.equal(made(x), made(x))
    made.train()
    assert not torch.equal(made(x), made(x))
    made = layer(hidden_dropout=0.0, attention_dropout=0.0, drop_path_rate=1.0).train()
    assert torch.equal(made(x), x)  # all rows
    x.requires_grad_()
    made(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(not p.grad.any() for p in made.parameters())


def test_training_in_mxfp8():
    """Every parameter gets a gradient near that of high precision, and codes are what is saved."""
    x, grad = torch.randn(S, B, HIDDEN), torch.randn(S, B, HIDDEN)
    made = layer(normalization="RMSNorm", activation="swiglu", fuse_qkv_params=True)
    found = []
    for enabled in (False, True):
        made.zero_grad()
        with te.autocast(enabled=enabled):
            out = made(x, is_first_microbatch=True)
        out.backward(grad)
        found.append([out.detach(), *(p.grad for p in made.parameters())])
    assert not torch.equal(*(results[0] for results in found))
    for plain, mx in zip(*found, strict=True):
        assert (mx - plain).norm() < 0.12 * plain.norm()
    kernels = str(te_mx.audit(made))
    assert all(kind in kernels for kind in ("LayerNormLinear", "Linear", "LayerNormMLP"))


@pytest.mark.parametrize("fused", [True, False])
def test_main_grads_of_a_whole_layer(fused):
    """Transformer Engine has them with fused weights only; te_mx also with three apart."""
    made = layer(fuse_qkv_params=fused, fuse_wgrad_accumulation=True)
    for parameter in made.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    x = torch.randn(S, B, HIDDEN)
    made(x).sum().backward()
    plain = layer(fuse_qkv_params=fused)
    plain(x).sum().backward()
    for (name, ours), theirs in zip(made.named_parameters(), plain.parameters(), strict=True):
        if ours.dim() > 1:
            assert torch.allclose(ours.main_grad, theirs.grad, atol=1e-5), name


# ------------------------------------------------------------------------ arguments that are theirs
FILES = {
    "DotProductAttention": ("attention", "dot_product_attention", "dot_product_attention.py"),
    "MultiheadAttention": ("attention", "multi_head_attention.py"),
    "TransformerLayer": ("transformer.py",),
}
SIZES = {"DotProductAttention": (HEADS, 8), "MultiheadAttention": (HIDDEN, HEADS),
         "TransformerLayer": (HIDDEN, FFN, HEADS)}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_constructors_take_every_argument_of_transformer_engine(kind):
    theirs = te_source.arguments(*FILES[kind], of=kind, method="__init__")
    given = {n: d for n, d in theirs.items() if d is not ... and n != "device"}
    getattr(te, kind)(*SIZES[kind], **given)
    for name in set(attention_checks.CONSTRUCTORS[kind]) - attention_checks.UNUSED:
        assert name in theirs
        value = True if theirs[name] is False else 7
        with pytest.raises(NotImplementedError, match=rf"te_mx.{kind}: {name}="):
            getattr(te, kind)(*SIZES[kind], **{name: value})
    assert set(attention_checks.CONSTRUCTORS[kind]) <= set(theirs)


@pytest.mark.parametrize("kind", FILES)
def test_forwards_take_every_argument_of_transformer_engine(kind):
    theirs = te_source.arguments(*FILES[kind], of=kind, method="forward")
    made = getattr(te, kind)(*SIZES[kind])
    x = torch.randn(S, B, HIDDEN)
    qkv = [torch.randn(S, B, HEADS, 8) for _ in range(3)]
    inputs = {"query_layer": qkv[0], "key_layer": qkv[1], "value_layer": qkv[2]}
    inputs = inputs if kind == "DotProductAttention" else {"hidden_states": x}
    given = {name: default for name, default in theirs.items() if default is not ...}
    made(**(given | inputs))
    for name in set(attention_checks.FORWARDS["DotProductAttention"]) & set(theirs):
        if name in attention_checks.UNUSED:
            continue
        value = "dual" if isinstance(theirs[name], str) else not theirs[name]
        with pytest.raises(NotImplementedError, match=f"{name}="):
            made(**(inputs | {name: value}))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        made(**inputs, nonsense=1)
