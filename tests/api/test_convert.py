"""convert_model and revert_model."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import te_mx


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 8, bias=False))


def test_converts_in_place_and_back():
    model = mlp()
    layers = [weakref.ref(model[0]), weakref.ref(model[2])]
    parameters = list(model.parameters())
    before = copy.deepcopy(model.state_dict())
    report = te_mx.convert_model(model)
    assert report.model is model
    assert report.converted == ["0", "2"] and report.skipped == {} and len(report) == 2
    assert [type(m) for m in model] == [te_mx.Linear, nn.ReLU, te_mx.Linear]
    assert (model[0], model[2]) == tuple(ref() for ref in layers)  # the same objects
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    x = torch.randn(3, 40)
    with te_mx.autocast():
        y = model(x)
    assert model[2].name == "2"

    report = te_mx.revert_model(model)
    assert report.count("reverted") == 2
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert set(model[0].__dict__) == set(nn.Linear(1, 1).__dict__)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with te_mx.autocast():
        assert not torch.equal(model(x), y)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))


def test_everything_of_a_layer_stays():
    model = mlp().to(torch.bfloat16).eval()
    model[0].weight.requires_grad_(False)
    model[2].train()
    seen = []
    model[0].register_forward_hook(lambda m, args, out: seen.append("forward"))
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    model[2]._register_state_dict_hook(lambda m, state, prefix, meta: seen.append("state_dict"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    te_mx.convert_model(model)
    assert model[0].weight.dtype == torch.bfloat16 and not model[0].weight.requires_grad
    assert not model[0].training and model[2].training
    with te_mx.autocast():
        model(torch.randn(3, 40, dtype=torch.bfloat16)).sum().backward()
    before = model[2].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[2].weight, before)
    model.state_dict()
    assert seen == ["forward", "backward", "state_dict"]


def test_meta_device():
    with torch.device("meta"):
        model = mlp()
    te_mx.convert_model(model)
    assert model[0].weight.is_meta
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    assert type(model[0]) is te_mx.Linear and model[0].weight.abs().max() <= 40**-0.5


def test_a_root_that_is_a_linear():
    root = nn.Linear(40, 8)
    report = te_mx.convert_model(root)
    assert type(root) is te_mx.Linear and report.model is root
    assert report.layers[0].name == "(root)"
    te_mx.revert_model(root)
    assert type(root) is nn.Linear


def test_dry_run_changes_nothing():
    model = mlp()
    report = te_mx.convert_model(model, dry_run=True)
    assert report.count("would convert") == 2 and report.converted == ["0", "2"]
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]


def test_filter():
    model = mlp()
    model.lm_head = nn.Linear(8, 100)
    asked = []

    def keep_head(module: nn.Module, fqn: str) -> bool:
        asked.append((fqn, type(module)))
        return fqn != "lm_head"

    report = te_mx.convert_model(model, filter_fn=keep_head)
    assert asked == [("0", nn.Linear), ("2", nn.Linear), ("lm_head", nn.Linear)]
    assert report.skipped == {"lm_head": "excluded by filter_fn"}
    assert type(model.lm_head) is nn.Linear


class Mixture(nn.Module):
    """Names and shapes of a language model that is nobody's; `mlp.gate` is no router."""

    def __init__(self, head: str = "lm_head"):
        super().__init__()
        self.embed, self.tied = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.positions = nn.Embedding(8, 32)
        self.tied.weight = self.embed.weight
        self.mlp = nn.ModuleDict({"gate": nn.Linear(32, 64), "up": nn.Linear(32, 64)})
        self.moe = nn.ModuleDict({"gate": nn.Linear(32, 4), "experts": nn.Linear(32, 64)})
        self.router = nn.ModuleDict({"classifier": nn.Linear(32, 4)})
        self.output, self.wide = nn.Linear(32, 96), nn.ModuleDict({"output": nn.Linear(32, 64)})
        self.add_module(head, nn.Linear(32, 80))
        self.found = nn.Linear(32, 48)

    def get_output_embeddings(self):
        return self.found


@pytest.mark.parametrize("head", ["lm_head", "embed_out"])
@pytest.mark.parametrize("filter_fn", [None, "auto"])
def test_heads_and_routers_stay_unless_asked_for(head, filter_fn):
    heads, routers = ["tied", "output", head, "found"], ["moe.gate", "router.classifier"]
    why = "kept in high precision as published recipes do; pass filter_fn to convert it"
    wanted = dict.fromkeys(heads, f"head: {why}")
    wanted |= dict.fromkeys(routers, f"router: {why}")
    report = te_mx.convert_model(Mixture(head), filter_fn=filter_fn, dry_run=True)
    kept = {name: why for name, why in report.skipped.items() if "published" in why}
    assert kept == wanted
    if filter_fn is None:
        assert report.converted == ["mlp.gate", "mlp.up", "moe.experts", "wide.output"]
    assert "1 embedding stays, " in report.totals and "positions.weight [8, 32]" in report.totals
    model = Mixture(head)
    report = te_mx.convert_model(model, filter_fn=lambda module, name: True)
    assert report.skipped == {} and len(report) == 10
    again = te_mx.convert_model(model, recipe="mxfp4")  # te_mx's layers, which was asked for
    assert again.count("bound") == 10


def test_a_pattern_of_overrides_asks_for_a_head():
    class WithoutEmbeddings(nn.Module):
        def get_output_embeddings(self):
            raise NotImplementedError

    model = Mixture()
    model.tower = WithoutEmbeddings()
    recipe = te_mx.recipe.overrides("mxfp4", {"lm_head": "mxfp8", "moe.gate": None})
    report = te_mx.convert_model(model, recipe=recipe)
    assert "lm_head" in report.converted and "published" in report.skipped["found"]
    assert report.skipped["moe.gate"].startswith("high precision, as the recipe says")


def test_shared_modules_and_shared_weights():
    model = mlp()
    model.again = model[0]
    model.tied = nn.Linear(40, 64)
    model.tied.weight = model[0].weight
    report = te_mx.convert_model(model)
    assert model.again is model[0] and model.tied.weight is model[0].weight
    assert report.layers[0].note == "shared: also again"
    assert len(report) == 3

    other = mlp()
    other.head = other[2]
    report = te_mx.convert_model(other, filter_fn=lambda m, fqn: fqn != "head")
    assert "2" in report.skipped


class Subclass(nn.Linear):
    pass


def test_what_cannot_be_converted_is_said():
    model = nn.ModuleDict(
        {
            "subclass": Subclass(4, 4),
            "lazy": nn.LazyLinear(4),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "wide": nn.Linear(4, 4, dtype=torch.float64),
            "patched": nn.Linear(4, 4),
            "attention": nn.MultiheadAttention(8, 2),
            "ours": te_mx.Linear(4, 4),
            "plain": nn.Linear(4, 4),
        }
    )
    model["patched"].forward = model["patched"].forward
    report = te_mx.convert_model(model)
    reasons = report.skipped
    assert "Subclass, a subclass of nn.Linear" in reasons["subclass"]
    assert "lazy" in reasons["lazy"]
    assert "convert first, then parametrize" in reasons["parametrized"]
    assert "torch.float64" in reasons["wide"]
    assert "forward was replaced" in reasons["patched"]
    assert "nn.MultiheadAttention" in reasons["attention.out_proj"]
    assert reasons["ours"] == "already a te_mx.Linear"
    assert report.converted == ["plain"]


class Wrapped(torch.Tensor):
    """A tensor subclass, as DTensor and quantized weights are."""


def test_a_weight_that_is_a_tensor_subclass_is_left_alone():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Wrapped))
    with pytest.warns(te_mx.ConversionWarning, match="converted nothing: all 1 nn.Linear of Seq"):
        report = te_mx.convert_model(nn.Sequential(layer))
    assert "Wrapped, not a plain parameter" in report.skipped["0"]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_hook_based_weight_norm_works():
    layer = nn.utils.weight_norm(nn.Linear(40, 8))
    te_mx.convert_model(layer)
    with te_mx.autocast():
        layer(torch.randn(3, 40)).sum().backward()
    assert layer.weight_g.grad is not None and layer.weight_v.grad is not None


def test_attention_and_encoder_layers_still_work():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    report = te_mx.convert_model(layer)
    assert report.converted == ["linear1", "linear2"]
    summary, *rows = str(report).splitlines()
    assert "2 of them do NOT run in te_mx: the fast path" in summary
    assert "set_fastpath_enabled(False)" in summary and "bypassed by the fast path" in rows[3]
    x = torch.randn(2, 5, 32)
    with te_mx.autocast():
        layer(x).sum().backward()
    assert layer.linear1.weight.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), layer.train()(x))


def test_revert_says_what_it_leaves():
    model = nn.ModuleDict(
        {
            "bias_returned": te_mx.Linear(4, 4, return_bias=True),
            "frozen": te_mx.Linear(4, 4),
            "parametrized": nn.utils.parametrizations.weight_norm(te_mx.Linear(4, 4)),
            "plain": nn.Linear(4, 4),
            "converted": te_mx.Linear(4, 4, init_method=nn.init.zeros_, name="x"),
        }
    )
    te_mx.freeze_weights(model["frozen"])
    report = te_mx.revert_model(model)
    assert report.count("reverted") == 1 and type(model["converted"]) is nn.Linear
    assert "unfreeze_weights" in report.skipped["frozen"]
    assert "return_bias" in report.skipped["bias_returned"]
    assert "subclass of te_mx.Linear" in report.skipped["parametrized"]
    assert len(report) == 4


def test_report_prints_a_table():
    model = mlp()
    report = te_mx.convert_model(model, filter_fn=lambda m, fqn: fqn == "0")
    lines = str(report).splitlines()
    assert lines[0] == "Sequential: linear layers: 1 converted, 1 skipped"
    assert lines[1].split() == ["name", "status", "shape", "note"]
    assert lines[3].split() == ["0", "converted", "40", "->", "64"]
    assert repr(report) == str(report)
    assert [layer.status for layer in report] == ["converted", "skipped"]
    with pytest.warns(te_mx.ConversionWarning, match=r"converted nothing: ReLU has no nn\.Linear"):
        assert str(te_mx.convert_model(nn.ReLU())) == "ReLU: linear layers: none"
