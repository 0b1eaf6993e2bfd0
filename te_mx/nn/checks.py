"""What a quantized forward asks of its input and of every parameter that it reads.

Parameters may be replaced at any time (by name, by load_state_dict(assign=True), on the meta
device), so this is asked in every call, before any address is taken. Elsewhere torch asks.

Checks of the arguments that the constructors of the modules share; each raises before a
parameter is made, and names the module and the argument."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from te_mx._ops.library import facts_of
from te_mx.context.region import is_tracing
from te_mx.dispatch.kernels import derive, derived
from te_mx.recipe import Settings
from te_mx.runtime.arguments import check_flag, check_size, shown, usable_device

_LARGEST = 1 << 47  # elements: more than a process can address


def sizes(owner: str, /, **given: Any) -> tuple[int, ...]:
    """The sizes of a module as ints.

    Raises:
        TypeError: one is no int.
        ValueError: one is negative, or together they make a weight that no memory holds.
    """
    made = tuple(check_size(f"{owner}: {name}", value) for name, value in given.items())
    if math.prod(size or 1 for size in made) >= _LARGEST:
        what = ", ".join(f"{name}={shown(size)}" for name, size in zip(given, made, strict=True))
        raise ValueError(f"{owner}: {what} make weights that no memory holds, 2^47 elements")
    return made


def flags(owner: str, /, **given: Any) -> None:
    """Raise TypeError unless all are bools."""
    for name, value in given.items():
        if type(value) is not bool:
            check_flag(f"{owner}: {name}", value)


def functions(owner: str, /, **given: Any) -> None:
    """Raise TypeError unless each is None or can be called."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise TypeError(f"{owner}: {name} must be a function or None, got {shown(value)}")


def check_name(owner: str, name: Any) -> None:
    """Raise TypeError unless the name of a layer is a string or None."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{owner}: name must be a string or None, got {shown(name)}")


def parameter_place(
    owner: str, device: Any, dtype: Any, params_dtype: Any
) -> tuple[torch.device | None, torch.dtype | None]:
    """Where parameters are made, and their dtype, which has two names.

    Raises:
        TypeError: what is no device, or no dtype that parameters can have.
        ValueError: a device that is not there, or names that disagree.
    """
    for name, value in (("dtype", dtype), ("params_dtype", params_dtype)):
        if value is not None and not _holds_parameters(value):
            raise TypeError(
                f"{owner}: {name} must be a torch.dtype for parameters, as torch.float32, "
                f"torch.bfloat16 or torch.float16, got {shown(value)}"
            )
    if None not in (dtype, params_dtype) and dtype != params_dtype:
        raise ValueError(
            f"{owner}: dtype={dtype} and params_dtype={params_dtype} disagree; they mean the same, "
            "give one"
        )
    if device is not None:
        device = usable_device(f"{owner}: device", device)
    return device, dtype if params_dtype is None else params_dtype


def _holds_parameters(dtype: Any) -> bool:
    """Whether parameters of a dtype can be initialized: not so 8-bit floats."""
    return (
        isinstance(dtype, torch.dtype)
        and (dtype.is_floating_point or dtype.is_complex)
        and dtype.itemsize > 1
    )


_known = derived()
_STRIDED = torch.strided
FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))


class Checked:
    """Mixin of the modules: looks at dtypes, devices and shapes, and waits for no device."""

    def _label(self) -> str:
        """The layer's name in errors."""
        raise NotImplementedError

    def _settings(self) -> Settings | None:
        """What a forward runs with."""
        raise NotImplementedError

    def _takes(self) -> str:
        """What errors about dtypes start with: the layer and the recipe in force."""
        settings = self._settings()
        who = "te_mx" if settings is None else f"the recipe in force ({settings.formats})"
        return f"{self._label()}: {who} takes"

    def _stored(self, key: str) -> tuple[Tensor, ...]:
        """What holds a weight without a master; its codes first."""
        raise NotImplementedError

    def _checked(self, inp: Tensor) -> tuple[Any, Any, Any, Any]:
        """Weight, bias, and the bias that is added, of a layer with one weight: raises unless y =
        inp @ weight.T + bias can run quantized. One look where such were taken before; and what
        stands for the facts of inp, weight and added, None where these are no plain ones."""
        layer: Any = self
        rows, cols = layer.out_features, layer.in_features
        held = layer._parameters
        weight = held.get("weight")
        if weight is not None and "bias" in held:
            bias = held["bias"]
        else:
            weight, bias = layer._weight_and_bias()
        added, key = None if layer.return_bias else bias, None
        if (
            type(inp) is Tensor
            and type(weight) is nn.Parameter
            and not (is_tracing() or inp.is_nested)
        ):
            key = (
                rows, cols, inp.layout, inp.shape, inp.dtype, inp.device, inp.requires_grad,
                inp.is_neg(), weight.shape, weight.dtype, weight.device, weight.requires_grad,
                weight.is_neg(), added if added is None else facts_of(added),
            )  # fmt: skip
            facts = _known.get(key)
            if facts is not None:
                return weight, bias, added, facts
        self._check_shape(inp, "in_features", cols)
        self._check_kind(inp)
        layer._source.check(layer, "weight", weight, (rows, cols), inp.device)
        if added is not None:
            self._check_parameter("bias", added, (rows,), inp.device)
        return weight, bias, added, None if key is None else derive(key, object())

    @staticmethod
    def _are_usual(inp: Tensor, size: int, parameters: Sequence[tuple[Any, Any]]) -> bool:
        """One look in the place of all checks: whether inp is [..., size] and every parameter a
        plain one of the shape beside it, or None of shape None, on one device."""
        usual = (
            type(inp) is Tensor
            and not inp.is_nested
            and inp.dim() > 0
            and inp.shape[-1] == size
            and inp.dtype in FLOATS
            and inp.layout is _STRIDED
        )
        for value, shape in parameters if usual else ():
            usual = usual and (
                value is None
                if shape is None
                else type(value) is nn.Parameter
                and value.shape == shape
                and value.device == inp.device
                and value.dtype in FLOATS
            )
        return usual

    def _check_shape(self, inp: Tensor, name: str, size: int) -> None:
        """Raise unless inp is a tensor [..., size]."""
        if not isinstance(inp, Tensor) or inp.is_nested:
            raise TypeError(f"{self._label()}: inp must be a dense tensor, got {shown(inp)}")
        shape = inp.shape
        if not shape or shape[-1] != size:
            raise ValueError(
                f"{self._label()}: the last dimension of inp must be {name}={size}, got inp of "
                f"shape {tuple(shape)}"
            )

    def _check_kind(self, inp: Tensor) -> None:
        """Raise unless inp is dense and of a dtype that is quantized."""
        if inp.dtype not in FLOATS or inp.layout is not _STRIDED:
            raise TypeError(
                f"{self._takes()} dense tensors in float32, bfloat16 and float16, got inp "
                f"{inp.dtype}, {inp.layout}; {_REMEDY}"
            )

    def _check_codes(self, keys: Sequence[str], device: torch.device) -> None:
        """Raise unless the codes of weights without a master are on this device."""
        for key in keys:
            codes = self._stored(key)[0]
            if codes.device != device:
                raise ValueError(
                    f"{self._label()}: inp is on {device} and {key}_codes on {codes.device}; move "
                    "one"
                )

    def _check_parameter(
        self, name: str, value: Tensor | None, shape: tuple[int, ...], device: torch.device
    ) -> None:
        """Raise unless a parameter can be read beside an inp on this device."""
        if (
            value is None
            or value.device != device
            or value.shape != shape
            or value.dtype not in FLOATS
        ):
            self._refuse_parameter(name, value, shape, device)
        if type(value) is not nn.Parameter:
            self._check_plain(name, value)

    def _check_plain(self, name: str, value: Tensor) -> None:
        """Refuse a parameter that only its own library can read, such as torchao's."""
        kind = type(value)
        if kind is Tensor or kind.__module__.partition(".")[0] in ("torch", "te_mx"):
            return
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise TypeError(
                f"{self._label()}: the {name} is a {kind.__module__}.{kind.__qualname__}, which "
                "another library quantized; te_mx quantizes plain parameters. Leave this "
                "layer out there (filter_fn), call te_mx.revert_model first, or run it under "
                "te_mx.autocast(enabled=False)"
            )

    def _refuse_parameter(
        self, name: str, value: Tensor | None, shape: tuple[int, ...], device: torch.device
    ) -> NoReturn:
        if value is None:
            raise ValueError(f"{self._label()}: {name} is None, it must be a parameter of {shape}")
        if value.dtype not in FLOATS:
            raise TypeError(
                f"{self._takes()} float32, bfloat16 and float16, got {name} {value.dtype}; "
                f"{_REMEDY}"
            )
        if value.device != device:
            remedy = "move one"
            if value.is_meta:
                remedy = f"{name} has no values yet: load it, or to_empty() and reset_parameters()"
            raise ValueError(
                f"{self._label()}: inp is on {device} and {name} on {value.device}; {remedy}"
            )
        raise ValueError(
            f"{self._label()}: {name} must have shape {shape}, got {tuple(value.shape)}; give it "
            "that shape, or build the layer with other sizes"
        )


_REMEDY = "convert it, or run this layer under te_mx.autocast(enabled=False)"
