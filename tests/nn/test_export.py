"""torch.export in both modes: one program for any number of rows, with the results of eager."""

from __future__ import annotations

import pytest
import torch
from hf_models import keep_head, model_of
from torch import nn
from torch.export import Dim

import te_mx

K, N, MOST = 64, 96, 256
ROWS = 1, 2, 17, 64, 65, 200
MXFP8 = te_mx.recipe.MXFP8BlockScaling()
KINDS = {
    "linear": lambda: te_mx.Linear(K, N),
    "norm": lambda: te_mx.LayerNormLinear(K, N),
    "gelu": lambda: te_mx.LayerNormMLP(K, N),
    "grouped": lambda: te_mx.GroupedLinear(4, K, N),
    "swiglu": lambda: te_mx.LayerNormMLP(K, N, activation="swiglu", normalization="RMSNorm"),
}
STATES = {
    "master": None,
    "kept": {},
    "codes": {"drop_master": True},
    "weight only": {"drop_master": True, "fmt": "mxfp4", "activations": "bf16"},
    "128x128": {"drop_master": True, "fmt": "fp8_e4m3_128x128"},
}
SIZES = {
    "tokens": Dim("tokens", min=2, max=MOST),
    "bounded": Dim("m", min=1, max=MOST),
    "auto": Dim.AUTO,
}


def made(kind: str, state: str) -> nn.Module:
    torch.manual_seed(3)
    module = KINDS[kind]().eval()
    te_mx.convert_model(nn.Sequential(module), recipe=MXFP8)
    if STATES[state] is not None:
        te_mx.freeze_weights(module, **STATES[state])
    return module


@torch.no_grad()
def exported(module, given, sizes, strict=False):
    return torch.export.export(module, given, dynamic_shapes=sizes, strict=strict).module()


@torch.no_grad()
def check(module, program, *inputs):
    for given in inputs:
        torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "state", "size", "sample"),
    [
        *(("linear", state, "bounded", 4) for state in STATES),
        ("linear", "codes", "auto", 100), ("norm", "codes", "auto", 4),
        ("gelu", "weight only", "auto", 4), ("swiglu", "codes", "bounded", 100),
    ],
)  # fmt: skip
def test_any_number_of_rows(kind, state, size, sample):
    module = made(kind, state)
    program = exported(module, (torch.randn(sample, K),), ({0: SIZES[size]},))
    check(module, program, *((torch.randn(m, K),) for m in ROWS))


@pytest.mark.parametrize(("kind", "state"), [("linear", "codes"), ("gelu", "kept")])
def test_any_number_of_rows_in_strict_mode(kind, state):
    module = made(kind, state)
    program = exported(module, (torch.randn(4, K),), ({0: SIZES["bounded"]},), strict=True)
    check(module, program, *((torch.randn(m, K),) for m in ROWS))


def splits_of(m: int) -> torch.Tensor:
    return torch.tensor([m // 2, 0, m - m // 2 - m // 3, m // 3])


@pytest.mark.parametrize(
    ("state", "strict"),
    [("master", False), ("kept", False), ("codes", False), ("weight only", False), ("codes", True)],
)
def test_groups_of_any_size(state, strict):
    module = made("grouped", state)
    given = torch.randn(40, K), splits_of(40)
    program = exported(module, given, ({0: SIZES["bounded"]}, None), strict)
    check(module, program, *((torch.randn(m, K), splits_of(m)) for m in ROWS))


def test_groups_of_listed_sizes():
    class Listed(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, [10, 0, 17, 13])

    module = Listed(made("grouped", "master"))
    for strict in (False, True):
        sizes = ({0: Dim("m", min=40, max=MOST)},)
        program = exported(module, (torch.randn(40, K),), sizes, strict)
        check(module, program, *((torch.randn(m, K),) for m in (40, 64, 200)))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("name", "state", "fuse"),
    [("Llama", "codes", False), ("Llama", "master", True), ("Mixtral", "codes", False)],
)
def test_whole_models(name, state, fuse):
    pytest.importorskip("transformers")
    more = {"num_local_experts": 4} if name == "Mixtral" else {}
    model = model_of(name, torch.float32, max_position_embeddings=MOST, **more).eval()
    te_mx.convert_model(model, filter_fn=keep_head, recipe=MXFP8, fuse=fuse)
    if STATES[state] is not None:
        te_mx.freeze_weights(model, **STATES[state])
    module, sample = Logits(model), torch.randint(64, (1, 12))
    program = exported(module, (sample,), ({1: SIZES["tokens"]},), strict=fuse)
    check(module, program, *((torch.randint(64, (1, m)),) for m in (2, 64, 65, 200)))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13 = te_mx.quantize(torch.randn(4, 2 * N, K))
        self.w2 = te_mx.quantize(torch.randn(4, K, N))

    def forward(self, x, scores, ids):
        return te_mx.moe.fused_experts(x, self.w13, self.w2, scores, ids)


class Groups(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, N, K))

    def forward(self, x, splits):
        return te_mx.grouped_linear(x, self.weight, offs=splits.cumsum(0))


def routed(m: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(m, K), torch.rand(m, 2), torch.randint(4, (m, 2), dtype=torch.int32)


@pytest.mark.parametrize("module", [Experts, Groups])
def test_functions_of_grouped_tokens(module):
    module, tokens = module(), {0: SIZES["bounded"]}
    experts = isinstance(module, Experts)
    sizes = (tokens, tokens, tokens) if experts else (tokens, None)
    made = [routed(m) if experts else (torch.randn(m, K), splits_of(m)) for m in (8, *ROWS)]
    program = exported(module, made[0], sizes)
    check(module, program, *made)
