"""Frozen weights in four bits: memory, what runs, what inputs are multiplied as, checkpoints."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import te_mx
from te_mx import formats
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu.frozen import MOST_ROWS, stream_for
from te_mx.formats import mxfp4_checkpoints
from te_mx.recipe import BlockScaling

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
KINDS = {
    "Linear": lambda: te_mx.Linear(64, 96),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(64, 96),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(64, 96, activation="swiglu"),
    "GroupedLinear": lambda: te_mx.GroupedLinear(3, 64, 96),
    "stacked": lambda: te_mx.GroupedLinear(3, 64, 96, single_grouped_weight=True),
}
every = pytest.mark.parametrize("kind", KINDS)
SPLITS = [5, 0, 20]
BF16 = torch.bfloat16
W4 = BlockScaling(w="mxfp4")
DEEPSEEK = te_mx.recipe.DeepSeekV3()  # of scale rules that MX formats do not have


def run(layer, x, recipe=None):
    args = [SPLITS] if isinstance(layer, te_mx.GroupedLinear) else []
    with torch.no_grad(), te_mx.autocast(enabled=recipe is not None, recipe=recipe):
        return layer(x, *args)


def frozen(kind, dtype=torch.float32, **how):
    layer = KINDS[kind]().to(dtype)
    te_mx.freeze_weights(layer, drop_master=True, fmt="mxfp4", **how)
    return layer


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@every
def test_memory(kind):
    layer = KINDS[kind]().to(BF16)
    elements = sum(w.numel() for key in layer._weight_keys for w in layer._each_of(key))
    rest = nbytes(p for name, p in layer.named_parameters() if p.dim() < 2 or "bias" in name)
    te_mx.freeze_weights(layer, drop_master=True, fmt="mxfp4")
    for held in ([*layer.parameters(), *layer.buffers()], layer.state_dict().values()):
        assert nbytes(held) - rest == elements * 17 // 32 <= 0.27 * 2 * elements


@every
@pytest.mark.parametrize("activations", [None, "mxfp8", "mxfp4", "mxfp6_e2m3"])
def test_quantized_inputs(kind, activations):
    """The bits of the unfrozen module under a recipe of these formats, in every region."""
    layer, x = KINDS[kind](), torch.randn(25, 64)
    x_fmt = formats.get(activations or "mxfp8").name
    expected = run(layer, x, BlockScaling(x=x_fmt, w="mxfp4"))
    regions = [te_mx.get_default_recipe(), W4]
    regions += [] if activations is None else [BlockScaling(x="mxfp8_e5m2"), DEEPSEEK]
    te_mx.freeze_weights(layer, fmt="mxfp4", activations=activations)
    for region in regions:
        assert torch.equal(run(layer, x, region), expected)
    te_mx.freeze_weights(layer, drop_master=True)
    for region in [None, *regions]:
        assert torch.equal(run(layer, x, region), expected)


def plain_of(kind, layer):
    """The module in high precision, with the values of the codes as its weights."""
    plain = copy.deepcopy(layer)
    te_mx.unfreeze_weights(plain, dequantize=True)
    return plain


@every
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_weight_only(kind, dtype):
    """Inputs as they are times what the codes stand for, whatever region runs; in fp16 too, where
    weights of other sizes than fp16 holds keep their values."""
    layer, x = frozen(kind, dtype, activations="bf16"), torch.randn(25, 64).to(dtype)
    y = run(layer, x)
    assert y.dtype == dtype
    exact = run(plain_of(kind, layer).double(), x.double())
    tolerance = {torch.float32: 1e-5, BF16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)
    for region in (te_mx.get_default_recipe(), DEEPSEEK):
        assert torch.equal(run(layer, x, region), y)
    steps = te_mx.audit(layer)
    if kind in ("GroupedLinear", "stacked") and cpu.missing_reason() is None:
        name = stream_for(dtype)
        few = len(x) <= MOST_ROWS[name] * len(SPLITS)
        assert {row.fprop for row in steps} == {name if few else "weight only"}
    elif dtype != BF16:  # of which they take as many rows
        assert {row.fprop for row in steps} == {"weight only"}
    assert {row.weight for row in steps} == {"frozen, no master, mxfp4"}
    assert "frozen, no master, mxfp4" in repr(layer)
    for activations, said in (("bf16", "inputs as they are"), ("mxfp4", "inputs mxfp4")):
        other = te_mx.Linear(64, 32)
        te_mx.freeze_weights(other, fmt="mxfp4", drop_master=True, activations=activations)
        assert repr(other).endswith(f"frozen, no master, mxfp4, {said})")


def test_weight_only_is_exact_beside_bf16():
    """One rounding: the product of an nn.Linear with these values, also under torch.autocast, of
    more rows than kernels take."""
    layer, x = frozen("Linear", BF16, activations="bf16"), torch.randn(65, 64, dtype=BF16)
    plain = plain_of("Linear", layer)
    assert torch.equal(run(layer, x), run(plain, x))
    with torch.autocast("cpu", BF16):
        assert torch.equal(run(layer, x.float()), run(plain, x))
    tiny = te_mx.Linear(64, 96, bias=False, dtype=torch.float16)
    with torch.no_grad():
        tiny.weight.fill_(2.0**-24)
    te_mx.freeze_weights(tiny, drop_master=True, fmt="mxfp4", activations="bf16")
    x = torch.full((1, 64), 2.0**10, dtype=torch.float16)
    assert torch.equal(run(tiny, x), torch.full((1, 96), 2.0**-8, dtype=torch.float16))


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear"])
def test_compiled(kind):
    """Groups are a loop, or all at once where no host looks, as here."""
    layer, x = frozen(kind, activations="bf16"), torch.randn(29, 64)
    args = (torch.tensor(SPLITS),) if kind == "GroupedLinear" else ()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, *args)
        torch.testing.assert_close(compiled, layer(x, *args), rtol=1e-5, atol=1e-5)


@every
@pytest.mark.parametrize("activations", [None, "mxfp4", "bf16"])
def test_copies_and_checkpoints(kind, activations, tmp_path):
    source, x = frozen(kind, activations=activations), torch.randn(25, 64)
    y = run(source, x)
    state = source.state_dict()
    torch.save(state, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=True)
    fresh, other = KINDS[kind](), KINDS[kind]()
    te_mx.freeze_weights(other, drop_master=True)
    for layer in (fresh, other):
        layer.load_state_dict(loaded)
    assign = KINDS[kind]().to("meta")
    assign.load_state_dict(loaded, assign=True)
    region = te_mx.get_default_recipe() if activations is None else DEEPSEEK
    copies = [copy.deepcopy(source), pickle.loads(pickle.dumps(source)), source.to("cpu")]
    for layer in (fresh, other, assign, *copies):
        assert layer._source.fixed == source._source.fixed
        assert torch.equal(run(layer, x), y) and torch.equal(run(layer, x, region), y)
    if activations == "bf16":  # tensors alone: the module's own
        other.load_state_dict(dict(state))
        assert torch.equal(run(other, x), y)


def test_conv1d_of_transformers():
    """A weight [in, out] is held as [out, in] codes."""
    utils = pytest.importorskip("transformers.pytorch_utils")
    layer, x = utils.Conv1D(96, 64), torch.randn(5, 64)
    te_mx.convert_model(layer)
    te_mx.freeze_weights(layer, drop_master=True, fmt="mxfp4", activations="bf16")
    with torch.no_grad():
        y = layer(x)
        te_mx.unfreeze_weights(layer, dequantize=True)
        assert layer.weight.shape == (64, 96)
        torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_a_later_version():
    state = frozen("Linear").state_dict()
    state._metadata[""]["te_mx_frozen"]["biases"] = True
    layer = te_mx.Linear(64, 96)
    with pytest.raises(RuntimeError, match="frozen in a way that this version of te_mx does not"):
        layer.load_state_dict(state)
    assert not layer._source.standing


# -------------------------------------------------------------------------------- parts of a model
def model():
    made = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 8))
    te_mx.convert_model(made)
    return made


def test_layers_by_a_filter():
    made, x = model(), torch.randn(4, 64)
    count = te_mx.freeze_weights(
        made, drop_master=True, fmt="mxfp4", filter_fn=lambda m, name: name in ("0", "2")
    )
    assert count == 2 and not made[3]._source.standing
    assert te_mx.freeze_weights(made, drop_master=True) == 3
    words = [row.weight for row in te_mx.audit(made)]
    assert words == ["frozen, no master, mxfp4"] * 2 + ["frozen, no master"]
    y = run(made, x)
    fresh = model()
    fresh.load_state_dict(made.state_dict())
    assert [m._source.settings.w for m in (fresh[0], fresh[3])] == ["mxfp4", "mxfp8_e4m3"]
    assert torch.equal(run(fresh, x), y)
    # Inputs can be told anew, codes cannot.
    assert te_mx.freeze_weights(made, activations="bf16") == 3
    assert run(made, x).isfinite().all()
    assert all(row.fprop.endswith("_stream") for row in te_mx.audit(made))
    te_mx.freeze_weights(made, activations="mxfp8")
    assert torch.equal(run(made, x), y)
    with pytest.raises(ValueError, match=r"0: it is frozen to mxfp4 already; call te_mx\.unf"):
        te_mx.freeze_weights(made, fmt="mxfp8")


def test_gradients_flow_to_the_input_where_masters_are_kept():
    layer, x = te_mx.Linear(64, 96), torch.randn(25, 64, requires_grad=True)
    with te_mx.autocast(recipe=W4):
        (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    te_mx.freeze_weights(layer, fmt="mxfp4")
    with te_mx.autocast():
        (got,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.equal(got, expected)
    # Formats that are fixed are those of backward too, whatever the region has.
    te_mx.freeze_weights(layer, activations="mxfp8")
    for recipe in (DEEPSEEK, None):
        with te_mx.autocast(recipe=recipe):
            (got,) = torch.autograd.grad(layer(x).square().sum(), x)
        assert torch.equal(got, expected)
    te_mx.unfreeze_weights(layer)
    assert layer.weight.requires_grad and not layer._source.standing


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"fmt": "mxfp5"}, ValueError, "fmt must be None, one of .*mxfp4.*got 'mxfp5'"),
        ({"fmt": torch.uint8}, ValueError, "fmt must be None, one of"),
        ({"fmt": "bf16"}, ValueError, "fmt must be None, one of"),
        ({"activations": "w4a16"}, ValueError, "activations must be None.* or 'bf16', got 'w4a16'"),
        ({"activations": BF16}, ValueError, "activations must be None"),
        ({"activations": "bf16"}, ValueError, "0: activations='bf16' needs drop_master=True"),
        ({"fmt": "mxfp4", "recipe": DEEPSEEK}, ValueError, "mxfp4 has the scale rules 'rceil'"),
        ({"activations": "fp8_e4m3_1x128"}, ValueError, "has the scale rules 'pow2'"),
        ({"filter_fn": lambda module, name: False}, ValueError, "chose none of the 3 te_mx"),
        ({"filter_fn": "0"}, TypeError, "filter_fn must be a function or None, got '0'"),
    ],
)
def test_what_is_refused(how, error, says):
    made = model()
    with pytest.raises(error, match=says):
        te_mx.freeze_weights(made, **how)
    assert all(row.weight == "master" for row in te_mx.audit(made))


# ------------------------------------------------------------------------------ names of others
def parts_of(layer, key="weight"):
    return layer._codes(key)


@pytest.mark.parametrize("assign", [False, True])
def test_compressed_tensors_loads(assign):
    source = frozen("Linear", activations="mxfp8")
    packed, scale = mxfp4_checkpoints.to_compressed_tensors(*parts_of(source), 64)
    state = {"weight_packed": packed, "weight_scale": scale, "bias": source.bias}
    layer, x = te_mx.Linear(64, 96), torch.randn(5, 64)
    layer.load_state_dict(state, assign=assign)
    assert torch.equal(run(layer, x), run(source, x))


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_of_compressed_tensors_load(stacked):
    source = frozen("stacked", activations="mxfp8")
    codes, scales = parts_of(source)
    state = {"bias": source.bias.detach()}
    for i in range(3):
        state |= {f"weight{i}_packed": codes[i], f"weight{i}_scale": scales[i]}
    layer = te_mx.GroupedLinear(3, 64, 96, single_grouped_weight=stacked)
    layer.load_state_dict(state)
    x = torch.randn(25, 64)
    assert torch.equal(run(layer, x), run(source, x))


def gpt_oss(source):
    blocks, scales = mxfp4_checkpoints.to_gpt_oss(*parts_of(source), 64)
    return {"weight_blocks": blocks, "weight_scales": scales, "bias": source.bias.detach()}


@pytest.mark.parametrize("kind", ["Linear", "stacked", "GroupedLinear"])
def test_gpt_oss_loads(kind):
    source = frozen("stacked" if kind == "GroupedLinear" else kind, activations="mxfp8")
    layer, x = KINDS[kind](), torch.randn(25, 64)
    layer.load_state_dict(gpt_oss(source))
    assert torch.equal(run(layer, x), run(source, x))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight_scales": None}, "weight_scales: missing beside weight_blocks"),
        ({"weight": torch.ones(96, 64)}, "weight and weight_blocks are both there"),
        ({"weight_scales": torch.ones(96, 2)}, "weight_blocks, weight_scales: scales must be a te"),
        ({"weight_blocks": torch.zeros(96, 3, 16, dtype=torch.uint8)}, "scales must have shape"),
        ({"weight_blocks": torch.zeros(96, 2, 8, dtype=torch.uint8)}, r"k / 32, 16\], got"),
    ],
)
def test_what_of_it_does_not_load(change, says):
    state = {k: v for k, v in (gpt_oss(frozen("Linear")) | change).items() if v is not None}
    layer = te_mx.Linear(64, 96)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=says):
        layer.load_state_dict(state)
    assert torch.equal(layer.weight, before) and not layer._source.standing
