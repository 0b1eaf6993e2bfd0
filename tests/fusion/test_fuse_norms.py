"""convert_model(fuse=True): normalizations in front of converted layers, and whole models."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from norm_modules import NormStep as NormAlone
from norm_modules import relative
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.autograd import input_cache
from te_mx.dispatch.fused import Norm
from te_mx.fusion.fused_norm import READ, UNREAD
from te_mx.fusion.norms import formula_of
from te_mx.nn.guards import ON_FROZEN, RAN

pytest.importorskip("transformers")
from hf_models import BF16, keep_head, model_of, pair, step, tokens


class RMS(nn.Module):
    """As of Llama: rounded before the weight is applied."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x):
        z = x.float()
        z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * z.to(x.dtype)


class ZeroCentered(RMS):
    """As of Gemma."""

    def forward(self, x):
        z = x.float()
        z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (z * (1.0 + self.weight.float())).type_as(x)


class Capped(RMS):
    def forward(self, x):
        return super().forward(x).clamp(max=2)


class NoRoot(RMS):
    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize(
    ("module", "kind", "zero_centered"),
    [
        (RMS(48), "RMSNorm", False),
        (RMS(48, 1e-2), "RMSNorm", False),
        (ZeroCentered(48), "RMSNorm", True),
        (nn.LayerNorm(48), "LayerNorm", False),
        (nn.LayerNorm(48, bias=False), "LayerNorm", False),
        (nn.RMSNorm(48, eps=1e-5), "RMSNorm", False),
    ],
)
def test_formulas_that_are_known(module, kind, zero_centered):
    formula = formula_of(module.to(BF16))
    eps = getattr(module, "variance_epsilon", None) or module.eps
    assert formula is not None and formula[:2] == (Norm(kind, eps), zero_centered)


@pytest.mark.parametrize(
    "module",
    [
        Capped(48),
        NoRoot(48),
        nn.RMSNorm(48),  # eps by dtype
        nn.GroupNorm(1, 48),
        nn.BatchNorm1d(48),
        nn.PReLU(48),
        nn.LayerNorm((2, 48)),
        nn.LayerNorm(48, elementwise_affine=False),
        nn.Linear(48, 48),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_not_certain_is_no_normalization(module):
    assert formula_of(module) is None


class Layer(nn.Module):
    """The half of a transformer's layer: what is normalized goes to two linear layers."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.a, self.b = nn.Linear(64, 32), nn.Linear(64, 32, bias=False)
        self.extra = nn.Parameter(torch.zeros(1))  # so that it is no MLP block

    def forward(self, x):
        z = self.norm(x)
        return x + torch.cat([self.a(z), self.b(z)], -1) + self.extra


def layer_of(make, dtype=BF16):
    torch.manual_seed(0)
    layer = Layer(make(64)).to(dtype)
    with torch.no_grad():
        for parameter in layer.norm.parameters():
            parameter.normal_()
    return layer


def run(layer, x):
    x = x.clone().requires_grad_()
    with te_mx.autocast():
        y = layer(x)
    grads = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])
    return [y.detach(), *grads]


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
@pytest.mark.parametrize("make", [RMS, ZeroCentered, nn.LayerNorm])
def test_bits_of_the_norm_that_modules_use(make, dtype):
    layer = layer_of(make, dtype)
    other = copy.deepcopy(layer)
    te_mx.convert_model(other)
    (row,) = [row for row in te_mx.convert_model(layer, fuse=True) if row.status == "fused"]
    assert row.name == "norm" and "quantized for a" in row.note

    class Alone(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
            self.how = formula_of(norm)

        def forward(self, x):
            z = NormAlone.apply(x.flatten(0, -2), self.weight, self.bias, *self.how[:2])
            z = z.view(x.shape)
            input_cache.open_for(z)  # for its readers, as that of the fused one
            return z

    other.norm = Alone(other.norm)
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    got, expected = run(layer, x), run(other, x)
    assert layer.norm.__dict__[RAN] == "fused"
    for one, two in zip(got, expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.usefixtures("family")
def test_readers_quantize_nothing_again(by_steps, monkeypatch):
    layer, x = layer_of(RMS), torch.randn(20, 64).to(BF16)
    te_mx.convert_model(layer, fuse=True)
    found = []
    find = input_cache.find
    monkeypatch.setattr(input_cache, "find", lambda *a: found.append(find(*a)) or found[-1])
    run(layer, x)
    assert len(found) == 2 and None not in found and found[0] is found[1]


@pytest.mark.usefixtures("family")
def test_the_first_step_under_checkpointing_is_as_the_next():
    """Hooks that drop what is saved do not look as if nobody had read the codes: what is computed
    again saves as many tensors as forward did."""
    layer, x = layer_of(RMS), torch.randn(20, 64).to(BF16)
    te_mx.convert_model(layer, fuse=True)
    expected = run(copy.deepcopy(layer), x)
    forward = layer.forward
    layer.forward = lambda z: checkpoint(forward, z, use_reentrant=False)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(run(layer, x), expected, strict=True))
        assert layer.norm.__dict__[READ] is True


@pytest.mark.usefixtures("family")
def test_codes_that_nobody_reads_are_made_once():
    """A reader that gets another tensor than z: found out when z is gone, and z stays the same."""
    layer, x = layer_of(RMS), torch.randn(20, 64).to(BF16)
    te_mx.convert_model(layer, fuse=True)
    first = run(layer, x)
    assert layer.norm.__dict__[READ] is True
    del layer.norm.__dict__[READ]
    for linear in (layer.a, layer.b):
        linear.register_forward_pre_hook(lambda _, args: (args[0].clone(),))
    apart = run(layer, x)
    assert layer.norm.__dict__[RAN] == "fused"
    for _ in range(2):
        again = run(layer, x)
        assert layer.norm.__dict__[RAN] == UNREAD
        assert all(torch.equal(a, b) for a, b in zip(again, apart, strict=True))
    # Gradients of two tensors are added after they were rounded, those of one before.
    for name, a, b in zip(("y", "x", *dict(layer.named_parameters())), apart, first, strict=True):
        if name in ("x", "norm.weight"):
            assert relative(a, b) <= 2**-8
        else:
            assert torch.equal(a, b)
    assert UNREAD in str(te_mx.audit(layer))
    for linear in (layer.a, layer.b):
        linear._forward_pre_hooks.clear()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert all(torch.equal(a, b) for a, b in zip(run(other, x), first, strict=True))


def test_changes_after_the_fusion_are_noticed():
    layer, plain, x = layer_of(RMS), layer_of(RMS), torch.randn(20, 64).to(BF16)
    te_mx.convert_model(layer, fuse=True)
    te_mx.convert_model(plain)
    for one in (layer, plain):
        one.norm.variance_epsilon = 1.0
    for a, b in zip(run(layer, x), run(plain, x), strict=True):
        assert torch.equal(a, b)
    assert layer.norm.__dict__[RAN] == "variance_epsilon was changed"
    for one in (layer, plain):
        one.norm.variance_epsilon = 1e-6
        one.norm.float()
    mixed = run(layer, x)  # z in fp32, as the class has it
    assert "differ in dtype" in layer.norm.__dict__[RAN]
    assert all(torch.equal(a, b) for a, b in zip(mixed, run(plain, x), strict=True))


def test_an_input_that_is_overwritten_before_backward_is_an_error():
    layer, x = layer_of(RMS), torch.randn(20, 64).to(BF16).requires_grad_()
    te_mx.convert_model(layer, fuse=True)
    with te_mx.autocast():
        inner = x * 1
        y = layer(inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ------------------------------------------------------------------------------------ whole models
NAMES = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "Phi", "Phi3",
    "GPTNeoX", "Starcoder2", "OPT",
)  # fmt: skip
NORMS = {  # fused of a layer
    "Gemma2": ("input_layernorm", "pre_feedforward_layernorm"),
    "Gemma3Text": ("input_layernorm", "pre_feedforward_layernorm"),
    "Phi": ("input_layernorm",),
    "OPT": ("self_attn_layer_norm", "final_layer_norm"),
}


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("name", NAMES)
def test_models_of_transformers(name):
    fused, plain, report = pair(name)
    rows = [(row.name.rpartition(".")[2], row.note) for row in report if row.status == "fused"]
    norms = NORMS.get(name, ("input_layernorm", "post_attention_layernorm"))
    assert {key for key, note in rows if "quantized for" in note} == set(norms)
    assert any(key == "mlp" for key, _ in rows) == (name != "OPT")
    if name == "OPT":
        assert "holds more than the layers of an MLP" in str(report)
    assert list(fused.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for one in (fused, plain):
            torch.manual_seed(0)
            for parameter in one.parameters():
                if parameter.dim() == 1:
                    drawn = torch.randn(parameter.shape)  # in fp32 every torch draws the same
                    parameter.add_(drawn.to(parameter.dtype), alpha=0.3)
    exact = copy.deepcopy(plain).float()
    te_mx.revert_model(exact)
    truth = step(exact)
    ours, theirs = step(fused), step(plain)
    ran = [m.__dict__.get(RAN) for m in fused.modules()]
    others = sum("orm" in key and "not quantized" in note for key, note in rows)
    assert [one for one in ran if one] == ["fused"] * (len(norms) + others + (name != "OPT"))
    assert relative(ours[0], truth[0]) <= 1.15 * relative(theirs[0], truth[0]) + 1e-3
    join = lambda made: torch.cat([g.double().flatten() for g in made[1].values()])  # noqa: E731
    error = [relative(join(one), join(truth)) for one in (ours, theirs)]
    assert set(ours[1]) == set(truth[1]) and error[0] <= 1.1 * error[1]


def test_saved_loaded_copied_and_given_back(tmp_path):
    import transformers

    fused, plain, _ = pair("Llama")
    expected = step(fused)[0]
    fused.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    assert not any("te_mx" in type(m).__module__ for m in again.modules())
    te_mx.convert_model(again, fuse=True, filter_fn=keep_head)
    for other in (again, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(step(other)[0], expected)
    assert plain.load_state_dict(fused.state_dict()).missing_keys == []
    assert te_mx.revert_model(fused).count("reverted") == 8 + 7
    assert {type(m) for m in fused.modules()} == {type(m) for m in model_of("Llama").modules()}
    assert not any("te_mx" in key for m in fused.modules() for key in m.__dict__)


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("drop", [False, True])
def test_frozen_for_inference(drop):
    fused, plain, _ = pair("Qwen3")
    for model in (fused, plain):
        te_mx.freeze_weights(model.eval(), drop_master=drop)
    with te_mx.autocast(), torch.no_grad():
        ours, theirs = fused(tokens()).logits, plain(tokens()).logits
    layer = fused.model.layers[0]
    assert layer.mlp.__dict__[RAN] == ON_FROZEN
    assert layer.input_layernorm.__dict__[RAN] == "fused" and relative(ours, theirs) < 0.02


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    fused, _, _ = pair("Qwen3")
    fused.train()
    logits, grads = step(fused)
    fused.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fused.enable_input_require_grads()
    again = step(fused)
    assert torch.equal(again[0], logits)
    assert all(torch.equal(again[1][name], grad) for name, grad in grads.items())


class LoRA(nn.Module):
    """As peft replaces layers."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False, dtype=BF16)
        self.up = nn.Linear(4, base.out_features, bias=False, dtype=BF16)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def test_adapters_on_a_fused_model():
    fused, plain, _ = pair("Llama")
    for model in (fused, plain):
        torch.manual_seed(3)
        layer = model.model.layers[0]
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.mlp.gate_proj = LoRA(layer.mlp.gate_proj)
    ours, theirs = step(fused), step(plain)
    mlp = fused.model.layers[0].mlp
    assert mlp.__dict__[RAN] == "gate_proj was replaced by a LoRA"
    assert relative(ours[0], theirs[0]) < 0.02 and set(ours[1]) == set(theirs[1])
    for name in ("q_proj.down.weight", "gate_proj.up.weight"):
        key = next(key for key in theirs[1] if key.endswith(name))
        assert relative(ours[1][key], theirs[1][key]) < 0.2


def test_compiled():
    fused, _, _ = pair("Llama")
    layer = fused.model.layers[0].train()
    x = torch.randn(1, 16, 64, dtype=BF16)
    rope = fused.model.rotary_emb(x, torch.arange(16)[None])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with te_mx.autocast():
        y, z = layer(x, position_embeddings=rope), compiled(x, position_embeddings=rope)
    assert relative(z, y) < 0.02


# ----------------------------------------------------------------------------- kept for backward
def kept(layer, x, rope):
    """Bytes that a layer keeps for backward, each storage once, without its parameters."""
    known = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *rope)}
    found, hold = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        hold.append(tensor)
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), te_mx.autocast():
        layer(x.requires_grad_(), position_embeddings=rope)
    return sum(found.values())


@pytest.mark.parametrize("heads", [4, 8])
def test_bytes_kept_by_a_layer_of_llama(heads):
    """Everything but parameters, of bf16's: as much only converted, where q, k and v keep codes of
    their own, 0.50 and 0.52 fused."""
    model = model_of(
        "Llama", hidden_size=256, intermediate_size=704, num_attention_heads=8,
        num_key_value_heads=heads, max_position_embeddings=512,
    )  # fmt: skip
    layer = model.model.layers[0]
    x = torch.randn(1, 256, 256, dtype=BF16)
    rope = model.model.rotary_emb(x, torch.arange(256)[None])
    plain = kept(layer, x, rope)
    te_mx.convert_model(layer)
    converted = kept(layer, x, rope)
    te_mx.convert_model(layer, fuse=True)
    fused = kept(layer, x, rope)
    assert converted <= plain and fused <= 0.55 * plain


def test_models_without_values_and_with_parameters_beside():
    """On the meta device, as models are built before they are loaded; Layer has one of its own."""
    eager = model_of("Gemma2", attn_implementation="eager")  # or o_proj is one more
    report = te_mx.convert_model(eager.to("meta"), fuse=True, filter_fn=keep_head)
    assert len(report.fused) == 1 + 4 + 1 + 2  # block, normalizations, the last one, tables, loss
    assert te_mx.convert_model(layer_of(RMS).to("meta"), fuse=True).fused == ["norm"]


def test_attention_that_keeps_nothing_is_left():
    eager = model_of("Llama", attn_implementation="eager")
    report = te_mx.convert_model(eager, fuse=True, filter_fn=keep_head)
    assert not any("o_proj" in name for name in report.fused)
    assert not eager.model.layers[0].self_attn.o_proj.keeps_given_input
    with te_mx.autocast():
        eager(tokens(), labels=tokens()).loss.backward()
