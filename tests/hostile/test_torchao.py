"""torchao's conversions of te_mx layers, which are nn.Linear for it: plain outside of a region, by
name inside of one, and not in silence where layers are replaced.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import te_mx
from te_mx.context import region
from te_mx.nn import converted

torchao = pytest.importorskip("torchao")


def quantized(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def plain():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).to(torch.bfloat16)


@pytest.mark.parametrize("frozen", [False, True])
def test_quantized_weights(frozen):
    model, x = plain(), torch.randn(5, 64, dtype=torch.bfloat16)
    expected = quantized(copy.deepcopy(model))(x)
    te_mx.convert_model(model)
    if frozen:
        te_mx.freeze_weights(model)
    with te_mx.autocast(enabled=False):
        assert torch.equal(quantized(model)(x), expected)
    with te_mx.autocast(), pytest.raises(TypeError, match=r"te_mx.Linear '0': .*torchao.*Int8Ten.*"
                                         r"revert_model.*enabled=False"):  # fmt: skip
        model(x)
    te_mx.unfreeze_weights(model)
    with pytest.raises(ValueError, match="0: weight is a Int8Tensor"):
        te_mx.freeze_weights(model)
    te_mx.revert_model(model)
    with te_mx.autocast():
        assert torch.equal(model(x), expected)


def test_layers_without_a_weight_are_named():
    """Codes alone, or a weight in several parameters: torchao would say that None has no shape."""
    model = nn.Sequential(plain(), te_mx.Linear(8, 6, parameters_split=("q", "k"), name="qk"))
    te_mx.convert_model(model)
    te_mx.freeze_weights(model[0], drop_master=True)
    assert model[0][0].weight is None and model[1].weight is None
    expected = r"te_mx.Linear '0.2': only codes .*torchao.*Leave.*unfreeze_weights.*dequantize"
    with pytest.raises(TypeError, match=expected):
        quantized(model[0][2])
    with pytest.raises(TypeError, match=r"te_mx.Linear '0.0': only codes"):
        quantized(model)
    with pytest.raises(TypeError, match=r"te_mx.Linear 'qk': its weight is split"):
        quantized(model[1])
    te_mx.unfreeze_weights(model, dequantize=True)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    assert quantized(model[0])(x).shape == (5, 8)
    assert not hasattr(te_mx.Linear, "weight")
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'weight'"):
        te_mx.Linear.__new__(te_mx.Linear).weight  # noqa: B018


def test_weights_quantized_in_a_fused_module():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, x = te_mx.LayerNormLinear(64, 32), torch.randn(5, 64)
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: True)
    with te_mx.autocast(), pytest.raises(TypeError, match=r"te_mx.LayerNormLinear.*torchao"):
        model(x)


def test_layers_that_float8_training_replaced(monkeypatch):
    from torchao.float8 import convert_to_float8_training

    monkeypatch.setattr(converted, "_lost", [])
    monkeypatch.setattr(region, "notices", [])
    model = plain()
    te_mx.convert_model(model)
    convert_to_float8_training(model)
    says = r"2 layers.*'0' by a torchao.float8.*Float8L"
    with pytest.warns(te_mx.ConversionWarning, match=says), te_mx.autocast():
        pass


def test_layers_that_a_filter_leaves_out(recwarn):
    from torchao.float8 import convert_to_float8_training

    model = plain()
    te_mx.convert_model(model)
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: not isinstance(module, te_mx.Linear)
    )
    with te_mx.autocast():
        model(torch.randn(5, 64, dtype=torch.bfloat16))
    assert type(model[0]) is te_mx.Linear
    assert not [w for w in recwarn if w.category is te_mx.ConversionWarning]
