"""MXFP8 as a precision of Lightning, for its Trainer and for Fabric:

    from te_mx.integrations.lightning import FabricMXPrecision, MXPrecision
    trainer = lightning.Trainer(plugins=[MXPrecision()])
    fabric = lightning.Fabric(plugins=[FabricMXPrecision()])

The model is converted where Lightning converts models, and its steps run inside `te_mx.autocast`.
Imports lightning, so nothing of te_mx imports it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

import te_mx
from te_mx.recipe import resolve_recipe
from te_mx.runtime.arguments import check_flag, shown

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Shared:
    """Linear layers in MXFP8, or in the formats of a recipe; the rest in the dtype of the weights.

    Args:
        weights_dtype: of parameters, of what is made while a module is built, and of floating-point
            inputs; results come back in torch's default dtype.
        recipe: of `te_mx.recipe`; None for the default one. It counts in training, validation,
            testing and prediction.
        convert: call `te_mx.convert_model` on the module; False where it holds te_mx layers.
        filter_fn, fuse: of `te_mx.convert_model`.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument of a wrong type or value.
    """

    precision: Any = "te-mx"

    def __init__(
        self,
        weights_dtype: torch.dtype = torch.bfloat16,
        *,
        recipe: Any = None,
        convert: bool = True,
        filter_fn: Callable[[nn.Module, str], bool] | str | None = None,
        fuse: bool = False,
    ) -> None:
        if weights_dtype not in _DTYPES:
            names = ", ".join(map(str, _DTYPES))
            raise ValueError(f"weights_dtype must be one of {names}, got {shown(weights_dtype)}")
        check_flag("convert", convert)
        check_flag("fuse", fuse)
        resolve_recipe(recipe)
        self.weights_dtype, self.recipe, self.convert = weights_dtype, recipe, convert
        self.filter_fn, self.fuse = filter_fn, fuse

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module with its layers converted and its parameters in their dtype."""
        if self.convert:
            te_mx.convert_model(module, filter_fn=self.filter_fn, fuse=self.fuse)
        return module.to(dtype=self.weights_dtype)

    def tensor_init_context(self) -> AbstractContextManager:
        """Tensors without a dtype get that of the weights."""
        return _default_dtype(self.weights_dtype)

    def module_init_context(self) -> AbstractContextManager:
        """Parameters too; layers are converted later, by `convert_module`."""
        return self.tensor_init_context()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """What a step runs in."""
        with _default_dtype(self.weights_dtype), te_mx.autocast(recipe=self.recipe):
            yield

    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors in the dtype of the weights."""
        return _cast(data, self.weights_dtype)

    def convert_output(self, data: Any) -> Any:
        """Floating-point tensors in torch's default dtype."""
        return _cast(data, torch.get_default_dtype())


class MXPrecision(_Shared, Precision):
    __doc__ = _Shared.__doc__


class FabricMXPrecision(_Shared, FabricPrecision):
    __doc__ = _Shared.__doc__


def _cast(data: Any, dtype: torch.dtype) -> Any:
    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    return apply_to_collection(data, function=cast, dtype=Tensor)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
