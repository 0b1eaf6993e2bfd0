"""filter_fn="auto" of convert_model: which layers are large enough to gain."""

from __future__ import annotations

import torch
from torch import nn

from te_mx.dispatch.cost import Prediction, costs_of, predict
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import choose
from te_mx.recipe import Settings

LEAST_GAIN = 1.05  # the error of the predictions is about as large


def predicted(layer: nn.Linear, tokens: int, settings: Settings) -> tuple[Prediction | None, str]:
    """The times of a layer with so many tokens, and what they were predicted for; None where
    nothing was measured of the kernel that it would run on."""
    device = layer.weight.device
    if device.type == "meta":
        # One that torch was built for need not be there: a machine where models are prepared.
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    n, k = layer.out_features, layer.in_features
    problem = Problem(
        "gemm", place_of(device), f"{settings.x}@any", f"{settings.w}@any", tokens, n, k,
        precision=settings.precision, spread=settings.spread, rule=settings.scale_rule,
    )  # fmt: skip
    kernel = choose(problem)[0].name
    costs = costs_of(kernel)
    where = f"{kernel} on {device.type}"
    if costs is None or settings.backward is not None:
        return None, where
    return predict(costs, tokens, n, k, torch.get_num_threads()), where


def too_small(layer: nn.Linear, tokens: int, settings: Settings) -> tuple[bool, str]:
    """Whether a layer is left out, and what the report says of it."""
    found, where = predicted(layer, tokens, settings)
    if found is None:
        return True, f'no gain is known: of {where} nothing was measured for filter_fn="auto"'
    said = f"{found.ratio:.2f}x of bf16 predicted at {tokens} tokens ({where})"
    if found.ratio < LEAST_GAIN:
        return True, f"too small to gain: {said}"
    return False, said
