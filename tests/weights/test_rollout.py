"""te_mx.rollout: what a trainer sends an engine, and where it lies there."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import te_mx
from te_mx.recipe import DeepSeekV3, MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from te_mx.weights import rollout

RECIPES = [MXFP8BlockScaling(), MXFP4BlockScaling(), DeepSeekV3(), NVFP4BlockScaling()]


def model() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(64),
        te_mx.Linear(64, 256, params_dtype=torch.bfloat16),
        te_mx.LayerNormMLP(256, 128, params_dtype=torch.bfloat16),
    ).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_engine_gets_the_codes_of_the_next_forward_where_its_own_lie(recipe):
    trainer, engine, x = model(), model(), torch.randn(5, 64, dtype=torch.bfloat16)
    te_mx.freeze_weights(engine, drop_master=True, recipe=recipe)
    with te_mx.autocast(recipe=recipe):
        engine(x)
        for p in trainer.parameters():
            p.data += 0.1
        sent = te_mx.rollout.snapshot(trainer)
        places = [t.data_ptr() for t in (*engine.buffers(), *engine.parameters())]
        assert te_mx.rollout.digest(engine) != te_mx.rollout.digest(sent)
        te_mx.rollout.load_(engine, sent)
        assert te_mx.rollout.digest(engine) == te_mx.rollout.digest(sent)
        assert te_mx.rollout.digest(trainer) == te_mx.rollout.digest(sent)
        assert places == [t.data_ptr() for t in (*engine.buffers(), *engine.parameters())]
        assert torch.equal(engine(x), trainer(x))
    # It is the state_dict of a frozen model, too; one bit more or less is seen.
    other = model()
    other.load_state_dict(sent)
    assert te_mx.rollout.digest(other) == te_mx.rollout.digest(sent)
    sent["1.weight"].view(torch.uint8)[0, 0] ^= 1
    assert te_mx.rollout.digest(other) != te_mx.rollout.digest(sent)


@pytest.mark.parametrize("recipe", [*RECIPES, MXFP4BlockScaling(precision="invariant")])
def test_weights_of_groups_and_bytes(recipe):
    layers = [te_mx.GroupedLinear(3, 128, 128, params_dtype=torch.bfloat16) for _ in range(2)]
    te_mx.freeze_weights(layers[1], drop_master=True, recipe=recipe)
    sent = te_mx.rollout.snapshot(layers[0], recipe=recipe)
    te_mx.rollout.load_(layers[1], sent)
    assert te_mx.rollout.digest(layers[1]) == te_mx.rollout.digest(sent)
    weights = sum(one.nbytes for name, one in sent.items() if "weight" in name)
    most = 0.27 if recipe.settings.w == "mxfp4" else 0.52
    assert weights <= most * 2 * 3 * 128 * 128


@pytest.mark.parametrize("recipe", RECIPES)
def test_split_weights_are_joined_and_a_layer_of_two_names_has_both(recipe):
    """As te_mx.pytorch.TransformerLayer has them, for an engine that has them in one piece."""

    def layers(**split) -> nn.Module:
        first = te_mx.LayerNormLinear(64, 192, params_dtype=torch.bfloat16, **split)
        second = te_mx.Linear(192, 64, params_dtype=torch.bfloat16)
        return nn.Sequential(first, second, first, second)

    trainer, engine = layers(parameters_split={"q": 128, "kv": 64}), layers()
    te_mx.freeze_weights(engine, drop_master=True, recipe=recipe)
    sent, x = te_mx.rollout.snapshot(trainer, recipe=recipe), torch.randn(5, 64).bfloat16()
    assert sent.keys() == engine.state_dict().keys()
    te_mx.rollout.load_(engine, sent)
    assert te_mx.rollout.digest(engine) == te_mx.rollout.digest(trainer, recipe=recipe)
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(engine(x), trainer(x))


def test_a_digest_holds_codes_of_one_weight(monkeypatch):
    codes_of, made = rollout._codes_of, list[weakref.ref[torch.Tensor]]()

    def counted(*args):
        assert sum(one() is not None for one in made) <= 1  # the last scales
        codes = codes_of(*args)
        made.extend(weakref.ref(one) for one in codes.values())
        return codes

    monkeypatch.setattr(rollout, "_codes_of", counted)
    te_mx.rollout.digest(model())
    assert len(made) == 3 * 2


def test_what_does_not_fit_changes_nothing():
    trainer, engine = model(), model()
    recipe = MXFP8BlockScaling()
    sent = te_mx.rollout.snapshot(trainer, recipe=recipe)
    with pytest.raises(ValueError, match=r"rollout.load_: 1.weight_scale is an entry that"):
        te_mx.rollout.load_(engine, sent)
    te_mx.freeze_weights(engine, drop_master=True, recipe=recipe)
    before = te_mx.rollout.digest(engine)
    with pytest.raises(ValueError, match=r"1.weight is tensor .* \(256, 64\)"):
        te_mx.rollout.load_(engine, sent | {"1.weight": sent["1.weight"][:, :32]})
    assert te_mx.rollout.digest(engine) == before
    te_mx.unfreeze_weights(engine, dequantize=True)
    te_mx.freeze_weights(engine, recipe=recipe)
    with pytest.raises(ValueError, match="keeps masters"):
        te_mx.rollout.load_(engine, dict(engine.state_dict()))
    with pytest.raises(ValueError, match="has no te_mx module"):
        te_mx.rollout.snapshot(nn.Linear(2, 2))
