"""LoRA and DoRA of peft on te_mx modules, with masters and on codes alone."""

from __future__ import annotations

import copy

import pytest
import torch
from beside_te import import_or_skip
from hf_models import keep_head, model_of, tokens
from norm_modules import filled
from torch import nn

import te_mx

peft = import_or_skip("peft")
from te_mx.integrations import peft as integration  # noqa: E402

SPLITS = [10, 0, 23]
KINDS = ["Linear", "LayerNormLinear", "GroupedLinear"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = te_mx.Linear(64, 96, name="first")
        self.normed = filled(te_mx.LayerNormLinear(96, 64, name="normed"))
        self.experts = te_mx.GroupedLinear(3, 64, 32, name="experts")

    def forward(self, x):
        return self.experts(self.normed(self.first(x)), SPLITS)


def config(*targets: str, **more):
    targets = targets or ("first", "normed", "experts")
    given = {"r": 4, "target_modules": list(targets), "init_lora_weights": False, **more}
    return integration.register(peft.LoraConfig(**given))


def run(model, x):
    with torch.no_grad(), te_mx.autocast():
        return model(x)


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # NVFP4
@pytest.mark.parametrize("how", ["plain", "frozen", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_learn_and_the_rest_stands_still(how, dora):
    model = Block()
    if how != "plain":
        fmt = how if how.endswith("fp4") else None
        te_mx.freeze_weights(model, drop_master=how != "frozen", fmt=fmt)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    adapted = peft.get_peft_model(
        model, config(use_dora=dora, lora_dropout=0.1, init_lora_weights=True)
    )
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    x, wanted = torch.randn(33, 64), torch.randn(33, 32)
    losses = []
    for _ in range(12):
        with te_mx.autocast():
            loss = (adapted(x) - wanted).square().mean()
        loss.backward()
        assert all(p.grad is not None for p in trained.values())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    adapted.unload()
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("kind", KINDS)
def test_lora_is_the_formula(kind):
    """In high precision: base(x) + scaling * B(A(x)), with x as the weight meets it."""
    model = Block()
    name = {"Linear": "first", "LayerNormLinear": "normed", "GroupedLinear": "experts"}[kind]
    layer = copy.deepcopy(getattr(model, name))
    adapted = getattr(peft.get_peft_model(model, config(name, lora_alpha=6)).base_model, name)
    x = torch.randn(33, layer.in_features)
    a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    if kind == "GroupedLinear":
        parts = zip(x.split(SPLITS), a, b, strict=True)
        expected = layer(x, SPLITS) + 1.5 * torch.cat([p @ a.T @ b.T for p, a, b in parts])
        got = adapted(x, SPLITS)
    else:
        z = layer._plain_norm(x) if kind == "LayerNormLinear" else x
        expected, got = layer(x) + 1.5 * (z @ a.T @ b.T), adapted(x)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_merge_and_unmerge(frozen, safe, dora):
    """Outside of te_mx.autocast a merged model computes the same; inside a frozen one does not run
    on what was quantized before."""
    model = Block()
    if frozen:
        te_mx.freeze_weights(model)
    adapted = peft.get_peft_model(model, config(use_dora=dora)).eval()
    x = torch.randn(33, 64)
    run(adapted, x)
    with torch.no_grad():
        expected = adapted(x)
        adapted.merge_adapter(safe_merge=safe)
        torch.testing.assert_close(adapted(x), expected, rtol=1e-3, atol=1e-3)
        merged = run(adapted, x)
        again = Block()
        plain = copy.deepcopy(adapted).unload()
        te_mx.unfreeze_weights(plain)
        again.load_state_dict(plain.state_dict())
        assert torch.equal(merged, run(again, x))
        adapted.unmerge_adapter()
        torch.testing.assert_close(adapted(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["first", "normed", "experts"])
def test_merging_into_codes_is_refused_by_name(name):
    model = Block()
    te_mx.freeze_weights(model, drop_master=True)
    adapted = peft.get_peft_model(model, config(name)).eval()
    x = torch.randn(33, 64)
    expected = run(adapted, x)
    for refused in (adapted.merge_adapter, adapted.merge_and_unload):
        with pytest.raises(RuntimeError, match=rf"{name}.*cannot merge.*dequantize=True"):
            refused()
    assert torch.equal(run(adapted, x), expected)
    te_mx.unfreeze_weights(model, dequantize=True)
    adapted.merge_and_unload()
    te_mx.freeze_weights(model, drop_master=True)


@pytest.mark.parametrize(
    "name, more, match",
    [
        ("first", {"init_lora_weights": "pissa"}, "first.*'pissa' needs the weight"),
        ("first", {"use_bdlora": peft.BdLoraConfig()}, "first.*use_bdlora is not supported"),
        ("experts", {"init_lora_weights": "olora"}, "experts.*'olora'"),
        ("experts", {"lora_bias": True}, "experts.*no lora_bias"),
    ],
)
def test_what_needs_the_weight_is_refused_by_name(name, more, match):
    model = Block()
    te_mx.freeze_weights(model, drop_master=True)
    with pytest.raises(ValueError, match=match):
        peft.get_peft_model(model, config(name, **more))


@pytest.mark.parametrize(
    "options, match",
    [({"return_bias": True}, "return_bias"), ({"parameters_split": ("a", "b")}, "one weight")],
)
def test_layers_that_cannot_be_adapted(options, match):
    model = nn.Sequential(te_mx.Linear(8, 8, **options))
    with pytest.raises(ValueError, match=match):
        peft.get_peft_model(model, config("0"))


def test_only_a_config_is_registered():
    with pytest.raises(TypeError, match="LoraConfig"):
        integration.register(nn.Linear(1, 1))


@pytest.mark.parametrize("registered", [False, True])
def test_a_model_of_transformers_on_codes_saves_and_loads_its_adapters(registered, tmp_path):
    """Plain LoRA needs no registering."""
    model = model_of("Llama")
    te_mx.convert_model(model, filter_fn=keep_head)
    te_mx.freeze_weights(model, drop_master=True, fmt="mxfp4", activations="bf16")
    base = copy.deepcopy(model)
    how = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"])
    adapted = peft.get_peft_model(model, integration.register(how) if registered else how)
    adapted(tokens(), labels=tokens()).loss.backward()
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    optimizer.step()
    optimizer.step()
    adapted.save_pretrained(tmp_path)
    how = peft.LoraConfig.from_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(
        base, tmp_path, config=integration.register(how) if registered else None
    )
    kind = type(loaded.get_submodule("base_model.model.model.layers.0.mlp.up_proj"))
    assert (kind is integration.LoraLinear) == registered
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens()).logits, adapted.eval()(tokens()).logits)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("drop_master", [False, True])
def test_dora_on_groups_is_that_of_each_group(dropout, drop_master):
    model = te_mx.GroupedLinear(3, 64, 32)
    te_mx.freeze_weights(
        model, drop_master=drop_master, activations="bf16" if drop_master else None
    )
    values = copy.deepcopy(model)
    te_mx.unfreeze_weights(values, dequantize=True)
    adapted = peft.get_peft_model(
        nn.ModuleDict({"experts": model}), config("experts", use_dora=True, lora_dropout=dropout)
    ).base_model.model["experts"]
    x, mask = torch.randn(35, 64), torch.ones(35, 64)
    if dropout:
        torch.manual_seed(1)
        mask = nn.functional.dropout(torch.ones(35, 64), dropout)
    torch.manual_seed(1)
    got, expected = adapted(x, SPLITS), []
    a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    for i, (rows, kept) in enumerate(
        zip(x[:33].split(SPLITS), mask[:33].split(SPLITS), strict=True)
    ):
        plain = nn.Linear(64, 32)
        plain.load_state_dict({"weight": values.weights()[i], "bias": values.biases()[i]})
        how = peft.LoraConfig(r=4, target_modules=["0"], use_dora=True, lora_dropout=dropout)
        theirs = peft.get_peft_model(nn.Sequential(plain), how).base_model.model[0]
        theirs.lora_A["default"].weight.data = a[i].detach()
        theirs.lora_B["default"].weight.data = b[i].detach()
        magnitude = adapted.lora_magnitude_vector["default"].weight[i]
        theirs.lora_magnitude_vector["default"].weight.data = magnitude.detach()
        if dropout:
            theirs.lora_dropout["default"] = _Masked(kept)
        expected.append(theirs(rows))
    torch.testing.assert_close(got[:33], torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert not got[33:].any()
    got.square().sum().backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if "lora_" in n)


class _Masked(nn.Module):
    """A dropout with a mask that is known."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x * self.mask


def test_several_adapters_of_groups_merge_and_unmerge():
    model = nn.ModuleDict({"experts": te_mx.GroupedLinear(3, 64, 32)})
    adapted = peft.get_peft_model(model, config("experts", use_dora=True))
    adapted.add_adapter("more", config("experts"))
    layer, x = adapted.base_model.model["experts"], torch.randn(33, 64)
    before = [w.detach().clone() for w in layer.get_base_layer().weights()]
    layer.set_adapter(["default", "more"])
    expected = layer(x, SPLITS)
    layer.merge(adapter_names=["default"])
    layer.merge(adapter_names=["more"])
    assert layer.merged_adapters == ["default", "more"]
    torch.testing.assert_close(layer(x, SPLITS), expected, rtol=1e-4, atol=1e-4)
    layer.unmerge()
    layer.lora_A["more"].weight.data[0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match="'more' is not finite"):
        layer.merge(safe_merge=True)
    for weight, value in zip(layer.get_base_layer().weights(), before, strict=True):
        torch.testing.assert_close(weight, value, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # NVFP4
@pytest.mark.parametrize(("dropout", "fmt"), [(0.0, "nvfp4"), (0.3, "mxfp4"), (0.3, "nvfp4")])
@pytest.mark.parametrize("kind", ["first", "normed"])
def test_dora_on_codes_is_pefts_on_their_values(kind, dropout, fmt):
    model = Block()
    te_mx.freeze_weights(model, drop_master=True, fmt=fmt, activations="bf16")
    values = copy.deepcopy(model)
    te_mx.unfreeze_weights(values, dequantize=True)
    ours, theirs = (
        peft.get_peft_model(m, config(kind, use_dora=True, lora_dropout=dropout))
        for m in (model, values)
    )
    theirs.load_state_dict(
        {k: v for k, v in ours.state_dict().items() if "lora_" in k}, strict=False
    )
    x, found = torch.randn(33, getattr(model, kind).in_features), []
    for adapted in (ours, theirs):
        layer = getattr(adapted.base_model, kind)
        torch.manual_seed(1)  # of the dropout
        y = layer(x)
        y.square().sum().backward()
        grads = {n: p.grad for n, p in layer.named_parameters() if "lora_" in n}
        found.append({"y": y.detach(), **grads})
    assert any("magnitude" in name for name in found[0])
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("dora", [False, True])
def test_compiles_on_codes_without_a_graph_break(dora):
    model = nn.Sequential(te_mx.Linear(64, 96), nn.GELU(), te_mx.Linear(96, 32))
    te_mx.freeze_weights(model, drop_master=True)
    adapted = peft.get_peft_model(model, config("0", "2", use_dora=dora)).base_model.model
    x = torch.randn(33, 64)
    adapted(x).square().sum().backward()
    expected = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
    adapted.zero_grad()
    torch.compile(adapted, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    for name, grad in expected.items():
        torch.testing.assert_close(adapted.get_parameter(name).grad, grad, rtol=1e-3, atol=1e-3)


def test_a_checkpoint_of_codes_is_adapted(tmp_path):
    """from_pretrained through te_mx's quantizer, then adapters, then Transformers' own loading of
    the same files as bf16 weights for comparison."""
    from te_mx.integrations import hf_quantizer

    model = model_of("Llama")
    te_mx.convert_model(model, filter_fn=keep_head)
    te_mx.freeze_weights(model, drop_master=True)
    te_mx.quantization_config(model, "mxfp8")
    model.save_pretrained(tmp_path)
    auto = import_or_skip("transformers").AutoModelForCausalLM
    hf_quantizer.register()
    try:
        loaded = auto.from_pretrained(tmp_path)
    finally:
        hf_quantizer.unregister()
    how = {"r": 4, "target_modules": "all-linear"}
    ours = peft.get_peft_model(loaded, integration.register(peft.LoraConfig(**how)))
    theirs = peft.get_peft_model(auto.from_pretrained(tmp_path), peft.LoraConfig(**how))
    losses = [m(tokens(), labels=tokens()).loss for m in (ours, theirs)]
    losses[0].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.01)
    assert sum(p.grad is not None for p in ours.parameters()) == 14


def test_conv1d_on_codes():
    model = model_of("GPT2")
    te_mx.convert_model(model)
    te_mx.freeze_weights(model, drop_master=True)
    adapted = peft.get_peft_model(model, config("c_attn", "c_fc", use_dora=True))
    adapted(tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
