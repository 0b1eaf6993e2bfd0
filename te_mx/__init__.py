"""te_mx: Transformer-Engine-style MXFP8 training and inference for PyTorch.

    te_mx.convert_model(model)   # every nn.Linear becomes a te_mx.Linear, in place
    with te_mx.autocast():
        loss = model(x).sum()

Importing never builds anything and never fails for want of the native code:
`te_mx.is_mxfp8_available` and `te_mx.explain` say what this machine runs."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import Any as _Any

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise  # torch is there, and says itself what it misses
    raise ImportError(
        "te_mx needs PyTorch 2.11 or newer, and this Python has no module torch: pip install "
        '"torch>=2.11" (https://pytorch.org has the choices for GPUs and CPUs)'
    ) from _error

from te_mx import distributed, formats, moe, recipe
from te_mx.api.audit import audit
from te_mx.api.convert import convert_model, revert_model
from te_mx.api.cuda_graphs import make_graphed_callables
from te_mx.api.explain import (
    Explanation,
    FallbackWarning,
    GroupedExplanation,
    explain,
    explain_grouped,
)
from te_mx.api.freeze import freeze_weights, unfreeze_weights
from te_mx.api.gemm import GemmOutput, gemm, prepack, quantize
from te_mx.api.grouped import grouped_gemm, grouped_linear, grouped_wgrad
from te_mx.api.memory import checkpoint_ops, record_saved
from te_mx.api.quantization_config import quantization_config
from te_mx.api.tensor import MXTensor
from te_mx.context.region import autocast, fp8_autocast
from te_mx.conversion.report import ConversionReport
from te_mx.dispatch.tuned.use import use_tuned_table
from te_mx.inspection import InspectionReport, inspect
from te_mx.nn import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from te_mx.nn.converted import ConversionWarning
from te_mx.nn.invariant import InvariantLinear
from te_mx.recipe import get_default_recipe, is_mxfp8_available
from te_mx.runtime import workspace
from te_mx.weights import rollout

try:
    __version__ = _version("te-mx")
except _PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"

__all__ = [
    "ConversionReport", "ConversionWarning", "Explanation", "FallbackWarning", "GemmOutput",
    "GroupedExplanation", "GroupedLinear", "InspectionReport", "InvariantLinear", "LayerNormLinear",
    "LayerNormMLP", "Linear", "MXTensor", "__version__", "audit", "autocast", "checkpoint_ops",
    "convert_model", "distributed", "explain", "explain_grouped", "formats", "fp8_autocast",
    "freeze_weights", "gemm", "get_default_recipe", "grouped_gemm", "grouped_linear",
    "grouped_wgrad", "inspect", "is_mxfp8_available", "make_graphed_callables", "moe", "prepack",
    "quantization_config", "quantize", "recipe", "record_saved", "revert_model", "rollout",
    "unfreeze_weights", "use_tuned_table", "workspace",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> _Any:
    # Transformer Engine's names: `te.pytorch` of `import te_mx as te` loads them when it is read.
    if name in ("common", "pytorch"):
        from importlib import import_module

        return import_module(f"te_mx.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
