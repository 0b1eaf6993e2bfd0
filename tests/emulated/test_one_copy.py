"""A weight that stands still lies once, whatever is called, as memory and state_dict tell."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from emulated_hopper import CALLS, PRODUCTS, hopper
from torch import nn

import te_mx
from te_mx.recipe import BlockScaling, Float8BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling

MX = {"mxfp8_e4m3": 1.04, "mxfp4": 0.54, "fp8_e4m3_128x128": 1.04}
ROWS = (1, 16, 64, 96, 512)
pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")


def recipe(fmt: str) -> object:
    if fmt == "mxfp4":
        return MXFP4BlockScaling()
    return MXFP8BlockScaling() if fmt.startswith("mx") else Float8BlockScaling()


def layer(fmt: str, kind: str = "linear") -> nn.Module:
    torch.manual_seed(3)
    if kind == "grouped":
        made = te_mx.GroupedLinear(2, 256, 512, bias=False, params_dtype=torch.bfloat16)
    else:
        made = te_mx.Linear(256, 512, bias=False, params_dtype=torch.bfloat16)
    return made


def held(module: nn.Module) -> int:
    """Bytes of all that a module keeps, in whatever object, each memory once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    due: list[object] = [module]
    while due:
        one = due.pop()
        if id(one) in seen or isinstance(one, type | weakref.ref):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, dict | list | tuple | set):
            due += one.values() if isinstance(one, dict) else one
        elif type(one).__module__.startswith("te_mx") and not callable(one):
            due += [getattr(one, name, None) for name in getattr(one, "__slots__", ())]
            due += getattr(one, "__dict__", {}).values()
        elif isinstance(one, nn.Module):
            due += one.__dict__.values()
    return sum(found.values())


def run(module: nn.Module, rows: int, fmt: str) -> torch.Tensor:
    x = torch.randn(rows, 256, dtype=torch.bfloat16)
    splits = (torch.tensor([rows // 2, rows - rows // 2]),)
    given = splits if isinstance(module, te_mx.GroupedLinear) else ()
    with torch.no_grad(), te_mx.autocast(recipe=recipe(fmt)):
        return module(x, *given)


@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("fmt", MX)
@pytest.mark.parametrize("drop", [True, False])
def test_one_copy_whatever_is_called(fmt, kind, drop):
    with hopper():
        module = layer(fmt, kind)
        numbers = sum(p.numel() for p in module.parameters())
        te_mx.freeze_weights(module, recipe=recipe(fmt), drop_master=drop)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        for rows in ROWS:
            run(module, rows, fmt)
            gc.collect()
            most = MX[fmt] + (0 if drop else 2)
            assert held(module) <= most * numbers, (rows, repr(module))
        after = module.state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype
        assert torch.equal(value.view(torch.uint8), after[key].view(torch.uint8))


@pytest.mark.parametrize("fmt", MX)
def test_codes_go_from_device_to_device(fmt):
    """state_dict, deepcopy, pickle and .to(): the same codes as of a layer frozen without Hopper,
    there and back."""
    plain = layer(fmt)
    te_mx.freeze_weights(plain, recipe=recipe(fmt), drop_master=True)
    expected = plain.state_dict()

    def same(module: nn.Module) -> None:
        state = module.state_dict()
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(value.view(torch.uint8), state[key].view(torch.uint8)), key

    with hopper():
        module = layer(fmt)
        te_mx.freeze_weights(module, recipe=recipe(fmt), drop_master=True)
        same(module)
        copied, file = copy.deepcopy(module), io.BytesIO()
        torch.save(module, file)
        same(copied)
        loaded = layer(fmt)
        loaded.load_state_dict(expected)
        same(loaded)
        assert repr(loaded) == repr(module)
        on_meta = copy.deepcopy(module).to("meta").to_empty(device="cpu")
        on_meta.load_state_dict(expected)
        same(on_meta)
        te_mx.unfreeze_weights(copied, dequantize=True)
        values = copied.weight.detach().clone()
    same(module)  # on a machine without, as it lies
    file.seek(0)
    read = torch.load(file, weights_only=False)
    same(read)
    assert "@rows" in repr(read)
    te_mx.unfreeze_weights(plain, dequantize=True)
    assert torch.equal(values, plain.weight)


@pytest.mark.parametrize("precision", ["adaptive", "exact"])
def test_gradients_are_those_of_the_plain_codes(precision):
    """dgrad starts from the bytes that the weight was made of."""
    rule = MXFP8BlockScaling(precision=precision)
    made = []
    for lies in (True, False):
        with hopper(), pytest.MonkeyPatch.context() as patch:
            module = layer("mxfp8_e4m3")
            if not lies:
                patch.setattr("te_mx.backends.sm90.rest.Frozen.accepts", lambda *_: "no")
            te_mx.freeze_weights(module, recipe=rule, drop_master=True)
            assert ("sm90_frozen" in repr(module)) == lies
            torch.manual_seed(5)
            x = torch.randn(40, 256, dtype=torch.bfloat16, requires_grad=True)
            with te_mx.autocast(recipe=rule):
                y = module(x)
            y.backward(torch.randn_like(y))
            made.append((y.detach(), x.grad))
    (y, dx), (plain_y, plain_dx) = made
    assert torch.equal(dx, plain_dx)
    assert torch.equal(y, plain_y)


def test_what_the_layer_says():
    with hopper():
        module = layer("mxfp8_e4m3")
        te_mx.freeze_weights(module, drop_master=True)
        assert "lies as mxfp8_e4m3@sm90_frozen, 1.03 bytes a parameter" in repr(module)


def test_masters_go_layer_by_layer():
    """While a model is frozen no more than a layer is there twice."""
    with hopper():
        model = nn.Sequential(*[layer("mxfp8_e4m3") for _ in range(4)])
        one = 256 * 512
        masters = [weakref.ref(m.weight) for m in model]
        most, left = [], te_mx.Linear.freeze

        def watched(self, *args):
            left(self, *args)
            gc.collect()
            most.append(sum(ref() is not None for ref in masters))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(te_mx.Linear, "freeze", watched)
            te_mx.freeze_weights(model, drop_master=True)
    assert most == [3, 2, 1, 0]
    assert held(model) <= 4 * 1.04 * one


def test_codes_alone_cut_k_where_tiles_are_few():
    """Training's forward does so only where its recipe asks."""
    with hopper():
        module = te_mx.Linear(8192, 256, bias=False, params_dtype=torch.bfloat16)
        te_mx.freeze_weights(module, fmt="mxfp4", drop_master=True)
        module(torch.randn(96, 8192, dtype=torch.bfloat16, requires_grad=True))
    (parts,) = (call.args.parts for call in CALLS if call.name == "gemm" and call.status == 0)
    assert parts > 1


@pytest.mark.parametrize("drop", [False, True])
def test_few_rows_read_the_same_bytes(drop):
    with hopper():
        module = te_mx.Linear(512, 256, dtype=torch.bfloat16)
        te_mx.freeze_weights(module, drop_master=drop)
        first = "mxfp8_e4m3@sm90_frozen" if drop else "mxfp8_e4m3@sm90:8"
        assert f"lies as {first}, 1.0" in repr(module)
        with torch.no_grad(), te_mx.autocast():
            module(torch.randn(2, 512, dtype=torch.bfloat16))
        assert PRODUCTS
        (row,) = te_mx.audit(module)
        assert row.lies.startswith(f"lies as {first}, 1.0")
        assert row.lies in repr(module)


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_frozen_weights_are_unpacked_at_each_call(kind, threads):
    """Codes stay two a byte; the product is that of the layer before it was frozen."""
    threads(1)
    x, recipe = torch.randn(100, 72), BlockScaling(x="mxfp8_e4m3", w="mxfp4")
    splits = ([60, 0, 40],) if kind == "GroupedLinear" else ()
    with hopper(), torch.no_grad():
        module = te_mx.GroupedLinear(3, 72, 41) if splits else te_mx.Linear(72, 41)
        with te_mx.autocast(recipe=recipe):
            want = module(x, *splits)
            te_mx.freeze_weights(module, drop_master=True, recipe=recipe)
            assert torch.equal(module(x, *splits), want)


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_codes_of_4_bits_under_another_recipe(kind):
    """Their format is not the one of the recipe that runs."""
    grouped = kind == "GroupedLinear"
    with hopper(), torch.no_grad():
        module = te_mx.GroupedLinear(3, 70, 41) if grouped else te_mx.Linear(70, 41)
        recipe = BlockScaling(w="mxfp4")
        te_mx.freeze_weights(module, drop_master=True, recipe=recipe)
        x, made = torch.randn(300, 70), []
        for one in (MXFP8BlockScaling(), recipe):
            with te_mx.autocast(recipe=one):
                made.append(module(x, *([[100, 0, 200]] if grouped else [])))
        assert torch.equal(*made) and len(PRODUCTS) == 2
