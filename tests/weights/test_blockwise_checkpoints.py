"""Checkpoints with weight_scale_inv, as DeepSeek-V3's: loaded and written byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_mx
from te_mx import formats
from te_mx.recipe import BlockScaling, DeepSeekV3, Float8BlockScaling

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
OUT, IN = 200, 300  # tails on both sides
SCALE = "weight_scale_inv"


def checkpoint(out=OUT, cols=IN, seed=0):
    """Codes of any value but NaN, scales of any fp32 number: made by no quantizer of te_mx."""
    torch.manual_seed(seed)
    codes = torch.randint(0, 256, (out, cols), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    scales = torch.rand(-(-out // 128), -(-cols // 128)) * 1e-2 + 1e-4
    return {"weight": codes.view(torch.float8_e4m3fn), SCALE: scales}


def values(state):
    """code * scale of the block."""
    codes, scales = state["weight"].float(), state[SCALE]
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * spread[: codes.shape[0], : codes.shape[1]]


def bytes_of(state):
    return {key: value.contiguous().view(torch.uint8) for key, value in state.items()}


def same_bytes(one, other):
    mine, theirs = bytes_of(one), bytes_of(other)
    assert mine.keys() == theirs.keys()
    assert all(one[key].dtype == other[key].dtype for key in mine)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("target", ["new", "frozen", "bound"])
def test_e8m0_scales_of_such_blocks(dtype, target):
    """Their number tells them from those of MXFP8; the values are the same fp32 numbers."""
    state = checkpoint()
    exponents = torch.randint(0, 256, (-(-OUT // 128), -(-IN // 128)), dtype=torch.uint8)
    exponents[0, 0], exponents[-1, -1] = 0, 255  # the smallest one, and NaN
    exact = torch.where(exponents == 255, torch.nan, torch.exp2(exponents.double() - 127).float())
    recipe = Float8BlockScaling() if target == "new" else DeepSeekV3()
    layer = te_mx.Linear(IN, OUT, bias=False)
    if target == "frozen":
        te_mx.freeze_weights(layer, drop_master=True, recipe=recipe)
    elif target == "bound":
        te_mx.convert_model(layer, recipe=recipe)
    layer.load_state_dict({"weight": state["weight"], SCALE: exponents.view(dtype)})
    kept = layer.state_dict()
    assert torch.equal(kept[SCALE].nan_to_num(-1), exact.nan_to_num(-1))
    assert torch.equal(bytes_of(kept)["weight"], bytes_of(state)["weight"])
    assert layer._source.settings == recipe.settings


@pytest.mark.parametrize("assign", [False, True])
def test_frozen_and_written_again(assign):
    state = checkpoint()
    layer = te_mx.Linear(IN, OUT, bias=False)
    layer.load_state_dict(state, assign=assign)
    assert layer._source.settings == DeepSeekV3().settings
    same_bytes(dict(layer.state_dict()), state)
    x = torch.randn(40, IN)
    with torch.no_grad():
        y = layer(x)
    q = te_mx.quantize(x, fmt="fp8_e4m3_1x128", scale_rule="fp32")
    left, right = q.dequantize(torch.float64), values(state).double().t()
    bound = (IN + 1) * 2.0**-24 * (left.abs() @ right.abs())  # sums of fp32, rounded once more
    assert ((y.double() - left @ right).abs() <= bound).all()


def test_scales_in_bf16():
    """As Qwen's checkpoints have them; fp32 holds them exactly."""
    state = checkpoint()
    state[SCALE] = state[SCALE].bfloat16()
    layer = te_mx.Linear(IN, OUT, bias=False)
    layer.load_state_dict(state)
    same_bytes(layer.state_dict(), state | {SCALE: state[SCALE].float()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves_and_casts_of_the_module_keep_the_scales(dtype):
    state = checkpoint()
    layer = te_mx.Linear(IN, OUT, bias=False)
    layer.load_state_dict(state)
    same_bytes(dict(layer.to(dtype).double().state_dict()), state)


def test_trained():
    """The values become parameters of the layer's dtype, which train under the recipe."""
    state = checkpoint()
    layer = te_mx.Linear(IN, OUT, bias=False)
    layer.load_state_dict(state)
    te_mx.unfreeze_weights(layer, dequantize=True)
    assert torch.equal(layer.weight, values(state)) and layer.weight.requires_grad
    # Quantized again, the values are those of the checkpoint to a rounding of fp32.
    fmt = formats.get("fp8_e4m3_128x128")
    made = fmt.dequantize(*fmt.quantize(layer.weight, "fp32"), IN, torch.float32)
    torch.testing.assert_close(made, values(state), rtol=2.0**-22, atol=0)
    before = layer.weight.detach().clone()
    x = torch.randn(64, IN, requires_grad=True)
    with te_mx.autocast(recipe=DeepSeekV3()):
        layer(x).square().mean().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    assert x.grad.isfinite().all() and not torch.equal(layer.weight, before)


def test_a_model_of_converted_layers():
    """Names of a model on disk, beside norms and embeddings in high precision."""
    plain = nn.ModuleDict({"norm": nn.LayerNorm(IN), "up": nn.Linear(IN, OUT, bias=False)})
    te_mx.convert_model(plain)
    state = {f"up.{key}": value for key, value in checkpoint().items()}
    state |= {f"norm.{key}": torch.randn(IN) for key in ("weight", "bias")}
    plain.load_state_dict(state)
    same_bytes(dict(plain.state_dict()), state)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts(stacked):
    """One entry a group, or stacked; each written as the layer holds its parameters."""
    states = [checkpoint(seed=i) for i in range(3)]
    state = {
        key.replace("weight", f"weight{i}"): value
        for i, one in enumerate(states) for key, value in one.items()
    }  # fmt: skip
    layer = te_mx.GroupedLinear(3, IN, OUT, bias=False, single_grouped_weight=stacked)
    layer.load_state_dict(state)
    saved = dict(layer.state_dict())
    if stacked:
        apart = {}
        for end in ("", "_scale_inv"):
            whole = saved[f"weight{end}"]
            apart |= {f"weight{i}{end}": whole[i] for i in range(3)}
        saved = apart
    same_bytes(saved, state)
    x, splits = torch.randn(50, IN), [20, 0, 30]
    with torch.no_grad():
        y = layer(x, splits)
        for i, (part, expected) in enumerate(zip(x.split(splits), y.split(splits), strict=True)):
            one = te_mx.Linear(IN, OUT, bias=False)
            one.load_state_dict(states[i])
            assert torch.equal(one(part), expected)


def test_what_freezing_writes_is_such_a_checkpoint():
    layer = te_mx.Linear(IN, OUT, bias=False)
    want = formats.get("fp8_e4m3_128x128").quantize(layer.weight.detach(), "fp32")
    te_mx.freeze_weights(layer, drop_master=True, recipe=DeepSeekV3())
    state = layer.state_dict()
    assert list(state) == ["weight", SCALE]
    assert torch.equal(state["weight"].view(torch.uint8), want[0])
    assert torch.equal(state[SCALE], want[1])
    recipe = Float8BlockScaling(w_block_scaling_dim=1)
    rows = te_mx.Linear(IN, OUT, bias=False)
    te_mx.freeze_weights(rows, drop_master=True, recipe=recipe)
    alone = dict(rows.state_dict())  # without metadata: the shapes say which blocks
    assert alone[SCALE].shape == (OUT, 3)
    other = te_mx.Linear(IN, OUT, bias=False)
    other.load_state_dict(alone)
    assert other._source.settings.w == "fp8_e4m3_1x128"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({SCALE: torch.ones(1, 1)}, r"got torch.float32 \(1, 1\); .*other formats"),
        ({SCALE: torch.ones(3, 2)}, r"got torch.float32 \(3, 2\); .*weight \(2, 3\) or \(200, 3\)"),
        ({SCALE: torch.ones(2, 3, dtype=torch.float16)}, "scales must be uint8"),
        ({SCALE: torch.ones(())}, "shapes must be|scales must be"),
        ({"weight": torch.zeros(OUT, IN, dtype=torch.int8)}, "codes must be float8_e4m3fn, got"),
        ({"weight_scale": torch.ones(2, 3)}, "are both there; keep the one that is meant"),
        ({SCALE: None}, "there are no scales for them"),
    ],
)
def test_what_does_not_load(change, says):
    state = checkpoint() | change
    state = {key: value for key, value in state.items() if value is not None}
    layer = te_mx.Linear(IN, OUT, bias=False)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=says):
        layer.load_state_dict(state)
    assert torch.equal(layer.weight, before) and not layer._source.standing


def test_fnuz_loads_where_the_recipe_says_so_or_as_what_convert_makes_of_it():
    row, square = "fp8_e4m3fnuz_1x128", "fp8_e4m3fnuz_128x128"
    state = checkpoint()
    made = formats.convert(state["weight"], state[SCALE], "fp8_e4m3_128x128", square)
    fnuz = dict(zip(("weight", SCALE), made, strict=True))
    layer = te_mx.Linear(IN, OUT, bias=False)
    with pytest.raises(RuntimeError, match=r"bind a recipe .*, or make others .*formats\.convert"):
        layer.load_state_dict(fnuz)
    bound = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    recipe = BlockScaling(x=row, w=square, g=row, scale_rule="fp32")
    te_mx.convert_model(bound, recipe=recipe)
    bound[0].load_state_dict(fnuz)
    layer.load_state_dict(state)
    for one in (layer, bound[0]):
        te_mx.unfreeze_weights(one, dequantize=True)
    assert torch.equal(bound[0].weight, layer.weight)
