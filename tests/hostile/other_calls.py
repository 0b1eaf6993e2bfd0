"""The table of recipes, autocast, explanations, the workspace and what works on whole models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from judge import Call
from malformed import (
    COUNT,
    DEVICE,
    FLAG,
    FUNCTION,
    MODULE,
    OPTIONAL_FUNCTION,
    OPTIONAL_WORD,
    RECIPE,
    UPPER_CASE,
    WORD,
    UsersError,
    changed,
    other_than,
    values,
)
from malformed_tensors import SPLITS, state_dict_of
from torch import nn

import te_mx
from te_mx import recipe

HYBRID = recipe.MXFP8BlockScaling(fp8_format=recipe.Format.HYBRID)
OPTIONAL_DEVICE = DEVICE
ONLY_FALSE = FLAG.but("zero") | values(True_=True)
OVERRIDE = OPTIONAL_WORD | UPPER_CASE


def _entered(autocast: Callable[..., Any], **arguments: Any) -> str:
    with autocast(**arguments) as region:
        return repr(region)


def _decorated(fn: Any) -> Any:
    return te_mx.autocast()(fn)()


def _generator() -> Any:
    yield 1


async def _async_generator() -> Any:
    yield 1


def _double(x: int = 2) -> int:
    return 2 * x


FLAGS = ("wgrad_with_hp", "one_copy_weights", "split_k", "keep_weight_columns")
GEMM_PARAMS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
RECIPES = (
    Call(
        "te_mx.recipe.MXFP8BlockScaling", lambda d: recipe.MXFP8BlockScaling,
        lambda d: {"margin": 0, "fp8_format": recipe.Format.E4M3, "fp8_dpa": False,
                   "fp8_mha": False, "backward_override": None, "enable_2d_quantization": False,
                   "scale_rule": "rceil", "precision": "adaptive", "alignment_spread": 8,
                   "wgrad_with_hp": False, "one_copy_weights": False, "split_k": False,
                   "keep_weight_columns": False},
        {"margin": COUNT | values(one=1),
         "fp8_format": other_than() | values(its_name="E4M3", E5M2=recipe.Format.E5M2,
                                             its_value=recipe.Format.E4M3.value),
         **dict.fromkeys(("fp8_dpa", "fp8_mha", "enable_2d_quantization"), ONLY_FALSE),
         "backward_override": OVERRIDE, "scale_rule": WORD | UPPER_CASE,
         "precision": WORD | UPPER_CASE, "alignment_spread": COUNT | values(nine=9),
         **dict.fromkeys(FLAGS, FLAG)},
    ),
    Call(
        "te_mx.recipe.Float8BlockScaling", lambda d: recipe.Float8BlockScaling,
        lambda d: {"use_f32_scales": True, "fp8_format": recipe.Format.E4M3,
                   "x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1,
                   **dict.fromkeys(GEMM_PARAMS, recipe.MMParams()), "fp8_dpa": False,
                   "fp8_mha": False, "backward_override": None, "amax_epsilon": 1e-12,
                   "precision": "adaptive", "alignment_spread": 8, "wgrad_with_hp": False,
                   "one_copy_weights": False, "split_k": False, "keep_weight_columns": False},
        {"use_f32_scales": FLAG,
         "fp8_format": other_than() | values(its_name="E4M3", E5M2=recipe.Format.E5M2),
         **dict.fromkeys(("x_block_scaling_dim", "grad_block_scaling_dim"),
                         COUNT | values(two=2, three=3)),
         "w_block_scaling_dim": COUNT | values(three=3),
         **dict.fromkeys(GEMM_PARAMS, other_than()
                         | values(not_split=recipe.MMParams(False), a_flag=True)),
         **dict.fromkeys(("fp8_dpa", "fp8_mha"), ONLY_FALSE), "backward_override": OVERRIDE,
         "amax_epsilon": values(nan=float("nan"), inf=float("inf"), minus=-1.0, huge=1e39,
                                words="1e-12", none=None, flag=True),
         "precision": WORD | UPPER_CASE, "alignment_spread": COUNT | values(nine=9),
         **dict.fromkeys(("wgrad_with_hp", "one_copy_weights", "split_k", "keep_weight_columns"),
                         FLAG)},
    ),
    Call(
        "te_mx.recipe.NVFP4BlockScaling", lambda d: recipe.NVFP4BlockScaling,
        lambda d: {"disable_rht": False, "disable_stochastic_rounding": False,
                   "disable_2d_quantization": True, "row_scaled_activation": True,
                   "nvfp4_4over6": "all", "nvfp4_4over6_e4m3_use_256": "weights",
                   "nvfp4_4over6_err_mode": "MSE", "fp4_format": recipe.Format.E2M1,
                   "fp8_format": recipe.Format.E4M3, "fp8_dpa": False, "fp8_mha": False,
                   "backward_override": None, "precision": "adaptive", "alignment_spread": 8,
                   "wgrad_with_hp": False, "one_copy_weights": False, "split_k": False,
                   "keep_weight_columns": False},
        {**dict.fromkeys(("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization",
                          "row_scaled_activation"), FLAG),
         **dict.fromkeys(("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode",
                          "precision"), WORD | UPPER_CASE),
         **dict.fromkeys(("fp4_format", "fp8_format"), WORD | values(both=recipe.Format.HYBRID)),
         **dict.fromkeys(("fp8_dpa", "fp8_mha"), ONLY_FALSE), "backward_override": OVERRIDE,
         "alignment_spread": COUNT | values(nine=9),
         **dict.fromkeys(("wgrad_with_hp", "one_copy_weights", "split_k", "keep_weight_columns"),
                         FLAG)},
    ),
    Call(
        "te_mx.recipe.MXFP4BlockScaling", lambda d: recipe.MXFP4BlockScaling,
        lambda d: {"x": "mxfp4", "w": "e4m3", "g": "mxfp4", "x_wgrad": "mxfp8_e4m3",
                   "w_dgrad": None, "scale_rule": "even", "stochastic_rounding": True,
                   "hadamard": 16, "hadamard_signs": 0x1234ABCD, "backward_override": None,
                   "precision": "adaptive", "alignment_spread": 8, "wgrad_with_hp": False,
                   "one_copy_weights": False, "split_k": False, "keep_weight_columns": False},
        {**dict.fromkeys(("x", "w", "g"), WORD | UPPER_CASE
                         | values(six="mxfp6_e2m3", turned="mxfp4+rht16:0x00000001")),
         **dict.fromkeys(("x_wgrad", "w_dgrad"), WORD.but("None")
                         | values(wide="mxfp8_e5m2", number=4)),
         "scale_rule": WORD | UPPER_CASE | values(random="rceil+sr", fp32="pow2"),
         "stochastic_rounding": FLAG.but("None"),
         "hadamard": COUNT.but("None") | values(eight=8),
         "hadamard_signs": COUNT | values(beyond=1 << 32),
         "backward_override": OVERRIDE, "precision": WORD | UPPER_CASE,
         "alignment_spread": COUNT | values(nine=9),
         **dict.fromkeys(("wgrad_with_hp", "one_copy_weights", "split_k", "keep_weight_columns"),
                         FLAG)},
    ),
    Call(
        "te_mx.recipe.CustomRecipe", lambda d: recipe.CustomRecipe,
        lambda d: {"qfactory": lambda role: "mxfp8", "fp8_format": recipe.Format.HYBRID,
                   "fp8_dpa": False, "fp8_mha": False, "backward_override": None,
                   "quantization_alignment": 32, "precision": "adaptive", "alignment_spread": 8,
                   "wgrad_with_hp": False, "one_copy_weights": False, "split_k": False,
                   "keep_weight_columns": False},
        {"qfactory": FUNCTION | values(nowhere="no_such_module:factory", a_class=dict),
         "fp8_format": other_than() | values(its_name="E4M3", E5M2=recipe.Format.E5M2),
         **dict.fromkeys(("fp8_dpa", "fp8_mha"), ONLY_FALSE), "backward_override": OVERRIDE,
         "quantization_alignment": COUNT.but("huge") | values(zero=0),
         "precision": WORD | UPPER_CASE, "alignment_spread": COUNT | values(nine=9),
         **dict.fromkeys(FLAGS, FLAG)},
    ),
    Call(
        "te_mx.recipe.CustomRecipe.of", lambda d: recipe.CustomRecipe(lambda role: "mxfp8").of,
        lambda d: {"name": "layers.0.fc2", "module_type": "linear"},
        {"name": values(none=None, number=3, raw=b"fc2", a_list=["fc2"]),
         "module_type": WORD | UPPER_CASE},
    ),
    Call(
        "te_mx.recipe.overrides", lambda d: recipe.overrides,
        lambda d: {"recipe": HYBRID, "patterns": {"*.fc2": "mxfp4"}},
        {"recipe": RECIPE, "patterns": other_than() | values(
            no_names={3: "mxfp8"}, no_recipe={"*": 3}, names_alone=["*"], nothing=None)},
    ),
    Call(
        "te_mx.recipe.MMParams", lambda d: recipe.MMParams,
        lambda d: {"use_split_accumulator": True}, {"use_split_accumulator": FLAG},
    ),
    Call(
        "te_mx.recipe.resolve_recipe", lambda d: recipe.resolve_recipe,
        lambda d: {"recipe": HYBRID}, {"recipe": RECIPE},
    ),
    Call(
        "te_mx.is_mxfp8_available", lambda d: te_mx.is_mxfp8_available,
        lambda d: {"return_reason": True}, {"return_reason": FLAG},
    ),
    Call(
        "te_mx.autocast", lambda d: functools.partial(_entered, te_mx.autocast),
        lambda d: {"enabled": True, "calibrating": False, "recipe": HYBRID},
        {"enabled": FLAG, "calibrating": FLAG, "recipe": RECIPE},
    ),
    Call(
        "te_mx.autocast.__call__", lambda d: _decorated, lambda d: {"fn": _double},
        {"fn": FUNCTION | values(a_generator_function=lambda: _generator,
                                 an_async_generator=lambda: _async_generator,
                                 a_generator=lambda: _generator())},
        says={"fn": "fn|autocast"},
    ),
    Call(
        "te_mx.fp8_autocast", lambda d: functools.partial(_entered, te_mx.fp8_autocast),
        lambda d: {"enabled": True, "calibrating": False, "fp8_recipe": HYBRID},
        {"enabled": FLAG, "calibrating": FLAG, "fp8_recipe": RECIPE},
        says={"fp8_recipe": "fp8_recipe|recipe"},
    ),
)  # fmt: skip

OPERAND = other_than() | changed(
    None, meta=lambda x: x.to("meta"), its_codes=lambda x: x.rowwise_data,
    another_k=lambda x: te_mx.quantize(torch.ones(8, 71)).to(x.device),
)  # fmt: skip
EXPLAINED = (
    Call(
        "te_mx.explain", lambda d: te_mx.explain,
        lambda d: {"layout": "TN", "m": 8, "n": 4, "k": 70, "device": d, "precision": "adaptive",
                   "alignment_spread": 8, "split_k": True, "classes": False, "recipe": HYBRID},
        {"layout": WORD | UPPER_CASE, **dict.fromkeys("mnk", COUNT.but("huge")), "device": DEVICE,
         "precision": WORD | UPPER_CASE, "alignment_spread": COUNT | values(nine=9),
         "split_k": FLAG, "classes": ONLY_FALSE, "recipe": RECIPE},
    ),
    Call(
        "te_mx.explain of tensors", lambda d: te_mx.explain,
        lambda d: {"A": te_mx.quantize(torch.ones(8, 70, device=d)),
                   "B": te_mx.quantize(torch.ones(4, 70, device=d)), "classes": True},
        {"A": OPERAND, "B": OPERAND, "classes": FLAG},
        covers="te_mx.explain",
    ),
    Call(
        "te_mx.explain of experts", lambda d: te_mx.explain,
        lambda d: {"m": 8, "n": 4, "k": 70, "device": d, "experts": 4, "top_k": 2},
        {"experts": COUNT.but("huge"), "top_k": COUNT.but("huge")}, covers="te_mx.explain",
    ),
    Call(
        "te_mx.explain_grouped", lambda d: te_mx.explain_grouped,
        lambda d: {"m_splits": [10, 14], "in_features": 70, "out_features": 40, "device": d,
                   "precision": "adaptive", "recipe": HYBRID},
        {"m_splits": SPLITS.but("one split less", "one split more", "no splits",
                                "more than the rows", "a tensor over the rows",
                                "an overflowing tensor"),
         **dict.fromkeys(("in_features", "out_features"), COUNT.but("huge")), "device": DEVICE,
         "precision": WORD | UPPER_CASE, "recipe": RECIPE},
    ),
)  # fmt: skip

WORKSPACE = (
    Call(
        "te_mx.workspace.reserve", lambda d: te_mx.workspace.reserve,
        lambda d: {"device": d, "nbytes": 4096},
        {"device": DEVICE | values(None_=None), "nbytes": COUNT},
    ),
    Call(
        "te_mx.workspace.reset", lambda d: te_mx.workspace.reset,
        lambda d: {"device": d}, {"device": DEVICE},
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------- models
def model(device: str) -> nn.Module:
    """Plain, with something to fuse."""
    layers = nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(64, 8)).to(device)


def converted(device: str, **how: Any) -> nn.Module:
    made = model(device)
    te_mx.convert_model(made, **how)
    return made


def frozen(device: str, **how: Any) -> nn.Module:
    made = converted(device)
    te_mx.freeze_weights(made, **how)
    return made


def _recorded(made: nn.Module) -> nn.Module:
    with te_mx.record_saved(made):
        made(torch.ones(4, 64, device=next(made.parameters()).device))
    return made


def _late(module: nn.Module, name: str) -> bool:
    if name == "1":
        raise UsersError
    return True


def on_model(function: Callable[..., Any], make: Callable[..., nn.Module]) -> Any:
    return lambda device: lambda **arguments: str(function(**arguments))


def _graphed(device: str) -> Any:
    """te_mx.make_graphed_callables over a torch that captures nothing."""

    def call(**arguments: Any) -> str:
        graphs, there = torch.cuda.make_graphed_callables, torch.cuda.is_available
        torch.cuda.make_graphed_callables = lambda functions, *others: functions
        torch.cuda.is_available = lambda: True
        try:
            return type(te_mx.make_graphed_callables(**arguments)).__name__
        finally:
            torch.cuda.make_graphed_callables, torch.cuda.is_available = graphs, there

    return call


MODELS = (
    Call(
        "te_mx.convert_model", on_model(te_mx.convert_model, model),
        lambda d: {"model": model(d), "filter_fn": lambda module, name: True, "dry_run": False,
                   "fuse": True, "recipe": HYBRID, "tokens": 8192},
        {"model": MODULE, "filter_fn": OPTIONAL_FUNCTION | values(that_raises_late=lambda: _late),
         "dry_run": FLAG, "fuse": FLAG, "recipe": RECIPE,
         "tokens": COUNT.but("huge")},
    ),
    Call(
        "te_mx.distributed.quantized_input_gather",
        on_model(te_mx.distributed.quantized_input_gather, converted),
        lambda d: {"model": converted(d), "enabled": True}, {"model": MODULE, "enabled": FLAG},
    ),
    Call(
        "te_mx.revert_model", on_model(te_mx.revert_model, converted),
        lambda d: {"model": converted(d, fuse=True)}, {"model": MODULE},
    ),
    Call(
        "te_mx.freeze_weights", on_model(te_mx.freeze_weights, converted),
        lambda d: {"model": converted(d), "drop_master": False, "recipe": HYBRID, "fmt": "mxfp4",
                   "activations": "mxfp8", "filter_fn": lambda module, name: True},
        {"model": MODULE | changed(None, plain=lambda m: model("cpu"),
                                   meta=lambda m: m.to("meta")),
         "drop_master": FLAG, "recipe": RECIPE,
         **dict.fromkeys(("fmt", "activations"), OPTIONAL_WORD | UPPER_CASE),
         "filter_fn": OPTIONAL_FUNCTION | values(that_raises_late=lambda: _late)},
        says={"model": "model|te_mx module|meta"},
    ),
    Call(
        "te_mx.unfreeze_weights", on_model(te_mx.unfreeze_weights, frozen),
        lambda d: {"model": frozen(d, drop_master=True), "dequantize": True},
        {"model": MODULE | changed(None, plain=lambda m: model("cpu")),
         "dequantize": FLAG | values(False_=False)},
        says={"model": "model|te_mx module"},
    ),
    Call(
        "te_mx.quantization_config", on_model(te_mx.quantization_config, frozen),
        lambda d: {"model": frozen(d, drop_master=True), "style": "mxfp8"},
        {"model": MODULE | changed(None, plain=lambda m: model("cpu")),
         "style": WORD | UPPER_CASE},
        says={"model": "model|no layer holds codes"},
    ),
    Call("te_mx.audit", on_model(te_mx.audit, frozen),
         lambda d: {"model": _recorded(frozen(d)), "memory": True, "invariant": True},
         {"model": MODULE, "memory": FLAG, "invariant": FLAG}),
    *(
        Call(
            f"te_mx.rollout.{name}", lambda d, name=name: getattr(te_mx.rollout, name),
            lambda d, name=name: {"model": converted(d), "recipe": HYBRID}
            | ({"like": frozen(d, drop_master=True)} if name == "snapshot" else {}),
            {"model": (MODULE.but("a dict", "a state dict") if name == "digest" else MODULE)
                      | changed(None, plain=lambda m: model("cpu")), "recipe": RECIPE}
            | ({"like": MODULE.but("None")} if name == "snapshot" else {}),
            says={"model": "model|te_mx module", "like": "model|te_mx module"},
        )
        for name in ("snapshot", "digest")
    ),
    Call(
        "te_mx.rollout.load_", lambda d: te_mx.rollout.load_,
        lambda d: {"model": frozen(d, drop_master=True),
                   "given": te_mx.rollout.snapshot(frozen(d, drop_master=True))},
        {"model": MODULE | changed(None, plain=lambda m: model("cpu"),
                                   with_masters=lambda m: frozen("cpu")),
         "given": state_dict_of("1.weight", "1.bias", "1.weight_scale")},
        says={"model": "model|te_mx module|rollout.load_", "given": "given|rollout.load_"},
    ),
    Call("te_mx.record_saved", on_model(te_mx.record_saved, model),
         lambda d: {"model": model(d)}, {"model": MODULE}),
    Call(
        "te_mx.make_graphed_callables", _graphed,
        lambda d: {"callables": converted(d), "sample_args": (torch.ones(4, 64, device=d),),
                   "num_warmup_iters": 3, "allow_unused_input": False,
                   "pool": None, "recipe": HYBRID},
        {"callables": FUNCTION, "pool": other_than("None"),
         "sample_args": other_than() | values(of_numbers=lambda: (1, 2), nested=lambda: (("x",),)),
         "num_warmup_iters": COUNT.but("huge"), "allow_unused_input": FLAG, "recipe": RECIPE},
    ),
    Call("te_mx.use_tuned_table", lambda d: te_mx.use_tuned_table, lambda d: {"path": None},
         {"path": OPTIONAL_WORD | values(a_folder="/", bytes_=b"table.csv")},
         says={"path": "path|tuned table"}),
    Call(
        "te_mx.ConversionReport.count",
        lambda d: te_mx.convert_model(model(d)).count, lambda d: {"status": "converted"},
        {"status": WORD | UPPER_CASE},
    ),
)  # fmt: skip
