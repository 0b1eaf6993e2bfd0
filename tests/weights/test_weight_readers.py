"""Who reads `weight` of a layer by itself, and what a model protects: modules that compute with it
and never call the layer, Transformers where it ties and resizes heads, and its lists of what stays
in fp32.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from hf_models import model_of, tokens
from torch import nn

import te_mx
from te_mx.weights.missing import weights_read


class Reader(nn.Module):
    """As the mixers of Mamba do: the product is in a method, and in a function inside of it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"p": nn.Linear(64, 32)})
        self.called, self.never = nn.Linear(32, 32), nn.Linear(32, 32)
        nn.init.ones_(self.never.weight)

    def mixed(this, x):
        return [this.inner.p.weight @ row for row in x]

    def forward(self, x):
        return self.called(torch.stack(self.mixed(x)))


def encoder(layers=1):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


@pytest.fixture
def no_fast_path():
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


# ----------------------------------------------------------------------------- modules that read it
def test_what_a_forward_reads_is_found_in_its_code():
    model = Reader()
    assert [layer for _, layer in weights_read(model)] == [model.inner.p]
    assert {name for name, _ in weights_read(encoder().layers[0])} >= {"linear1", "linear2"}
    assert not list(weights_read(nn.Sequential(model))) and not list(weights_read(model.called))


@pytest.mark.parametrize("make", [Reader, encoder])
def test_such_weights_are_not_dropped(make):
    """All of them are named, nothing changes, and the rest can be frozen."""
    model = make()
    report = te_mx.convert_model(model)
    read = ["inner.p"] if make is Reader else ["layers.0.linear1", "layers.0.linear2"]
    assert [row.name for row in report if row.note and row.name in read] == read
    with pytest.raises(ValueError, match=f"^{', '.join(read)}: the forward of .* reads `weight`"):
        te_mx.freeze_weights(model, drop_master=True)
    assert all(not m._source.standing for m in model.modules() if isinstance(m, te_mx.Linear))
    assert te_mx.freeze_weights(model) == len(report.converted)
    te_mx.unfreeze_weights(model)
    if make is Reader:
        others = {"filter_fn": lambda _, name: name not in read}
        assert te_mx.freeze_weights(model, drop_master=True, **others) == 2
        with te_mx.autocast():
            assert model(torch.randn(3, 64)).shape == (3, 32)


@pytest.mark.usefixtures("no_fast_path")
def test_without_the_fast_path_nothing_reads_them():
    """Until somebody turns it on again; then torch is told which layer it is."""
    model, x = encoder(2), torch.randn(2, 8, 64)
    te_mx.convert_model(model)
    with torch.no_grad(), te_mx.autocast():
        expected = model(x)
        assert te_mx.freeze_weights(model, drop_master=True) == 4
        assert torch.equal(model(x), expected)
        torch.backends.mha.set_fastpath_enabled(True)
        with pytest.raises(TypeError, match=r"linear1': only codes .*unfreeze_weights"):
            model(x)


def test_codes_that_are_loaded_below_a_reader():
    source, model = nn.Linear(64, 32), Reader()
    te_mx.convert_model(model)
    layer = te_mx.Linear(64, 32)
    te_mx.freeze_weights(layer, drop_master=True)
    model.inner.p.load_state_dict(layer.state_dict())
    with pytest.raises(TypeError, match=r"inner.p': only codes .* the forward of Reader has no"):
        model(torch.randn(3, 64))
    assert layer.weight is None and source.weight is not None  # reading by others gives None


def test_what_a_reader_bypasses_is_in_the_report():
    model = Reader()
    notes = {row.name: row.note for row in te_mx.convert_model(model, dry_run=True)}
    assert notes["inner.p"] == "the forward of Reader reads its weight too, in high precision"
    assert notes["called"] == notes["never"] == ""


# ----------------------------------------------------------------------- what a model keeps in fp32
def test_what_transformers_keeps_in_fp32_stays():
    sizes = {
        "vocab_size": 64,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 1,
        "num_heads": 4,
    }
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    for fuse in (False, True):
        for whole in (model, nn.ModuleDict({"inside": model})):
            report = te_mx.convert_model(whole, dry_run=True, fuse=fuse)
            kept = {name: why for name, why in report.skipped.items() if name.endswith("wo")}
            assert len(kept) == 2 and report.converted
            assert all(
                "T5ForConditionalGeneration keeps it in fp32" in why for why in kept.values()
            )
            assert all("_keep_in_fp32_modules: 'wo'" in why for why in kept.values())
    te_mx.convert_model(model)
    wo = model.encoder.block[0].layer[1].DenseReluDense.wo
    assert type(wo) is nn.Linear
    for module in model.modules():  # the stacks inside are models of their own
        if hasattr(module, "_keep_in_fp32_modules"):
            module._keep_in_fp32_modules = None
    te_mx.convert_model(model)
    assert type(wo) is te_mx.Linear


@pytest.mark.parametrize("name", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
@pytest.mark.parametrize(
    ("entry", "left"),
    [("0", ["0"]), ("1.weight", ["1"]), ("deep.2", ["deep.2"]), ("de*", ["deep.2"]), ("ee", []),
     ("(", []), ("weight", ["0", "1", "deep.2"])],
)  # fmt: skip
def test_entries_are_parts_of_names(name, entry, left):
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    model.add_module("deep", nn.ModuleDict({"2": nn.Linear(32, 32)}))
    setattr(model, name, [entry])
    for fuse in (False, True):
        report = te_mx.convert_model(model, dry_run=True, fuse=fuse)
        assert [n for n, why in report.skipped.items() if "in fp32" in why] == left


def test_a_protected_layer_gets_no_recipe():
    model = nn.Sequential(te_mx.Linear(64, 32), te_mx.Linear(32, 32))
    model._keep_in_fp32_modules = ["1"]
    te_mx.convert_model(model, recipe=te_mx.recipe.MXFP8BlockScaling())
    assert model[0]._bound is not None and model[1]._bound is None


# ------------------------------------------------------------------------ torch.autocast turned off
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_autocast_does_not_switch_quantization_off(dtype):
    """It says dtypes, as in Transformer Engine: turned off, the result has that of the input."""
    layer, x = nn.Linear(64, 32, dtype=dtype), torch.randn(5, 64, dtype=dtype)
    te_mx.convert_model(layer)
    with torch.no_grad(), te_mx.autocast():
        quantized = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                assert layer(x).dtype == dtype and torch.equal(layer(x), quantized)
                with te_mx.autocast(enabled=False):
                    plain = layer(x)
    assert torch.equal(plain, nn.functional.linear(x, layer.weight, layer.bias))
    assert not torch.equal(plain, quantized)


# -------------------------------------------------------------------------------------- heads, tied
def frozen_llama(tied=True):
    model = model_of("Llama", torch.float32, tie_word_embeddings=tied).eval()
    with torch.no_grad():
        logits = model(tokens()).logits
    te_mx.convert_model(model, filter_fn=lambda *_: True)
    te_mx.freeze_weights(model, drop_master=True)
    return model, logits


def close(model, logits):
    with torch.no_grad(), te_mx.autocast():
        got = model(tokens()).logits[..., : logits.shape[-1]]
    return (got - logits).norm() < 0.1 * logits.norm()


def resize(model, size=80):
    model.resize_token_embeddings(size, mean_resizing=False)


@pytest.mark.parametrize("steps", ["", "tie", "tie resize", "copy"])
def test_a_tied_head_is_tied_again(steps):
    """Whoever gave the head a weight meanwhile, that one stays, and trains as it did."""
    model, logits = frozen_llama()
    assert model.lm_head.weight is None
    for step in steps.split():
        {"tie": model.tie_weights, "resize": lambda: resize(model), "copy": lambda: None}[step]()
    if "tie" in steps:
        with pytest.raises(RuntimeError, match=r"tie_weights.*unfreeze_weights.*keeps this one"):
            model(tokens())
    if "copy" in steps:  # a copy has what its codes stand for
        model = copy.deepcopy(model)
    te_mx.unfreeze_weights(model, dequantize=True)
    embeddings = model.get_input_embeddings()
    assert (model.lm_head.weight is embeddings.weight) == ("copy" not in steps)
    assert close(model, logits) and model.lm_head.weight.requires_grad
    assert model.lm_head.weight.shape[0] == (80 if "resize" in steps else 64)
    if "copy" not in steps:
        with te_mx.autocast():
            model(tokens(), labels=tokens()).loss.backward()
        assert embeddings.weight.grad is not None


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_codes_is_not_resized(tied):
    """The error says what to do first, and then it works."""
    model, logits = frozen_llama(tied)
    with pytest.raises(TypeError, match=r"lm_head': only codes .*unfreeze_weights"):
        resize(model)
    te_mx.unfreeze_weights(model, dequantize=True)
    resize(model)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert model.lm_head.weight.shape == (80, 64) and close(model, logits)


def test_two_heads_of_codes_stay_apart():
    """Neither has the weight any more that both had."""
    model = nn.ModuleDict({"a": te_mx.Linear(64, 32), "b": te_mx.Linear(64, 32)})
    model["a"].weight = model["b"].weight
    te_mx.freeze_weights(model, drop_master=True)
    te_mx.unfreeze_weights(model, dequantize=True)
    assert torch.equal(model["a"].weight, model["b"].weight)
    assert model["a"].weight is not model["b"].weight
