"""Watching a model run: every product of its linear layers is measured when it is computed.

nn.Linear and te_mx's modules, in high precision, all multiply by torch.nn.functional.linear: what
it is given inside of a layer is that layer's x and w, also where a module normalizes or activates
first, and the gradient of what it returns is g. The Conv1D of GPT-2 calls torch.addmm, and stacked
experts leave their products to whoever watches them. Only numbers are kept."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from te_mx.api.memory import is_layer
from te_mx.autograd.linear_recipe import DGRAD, FPROP, GEMMS, WGRAD
from te_mx.context.region import Region, active_region, entered_again
from te_mx.formats import Format
from te_mx.fusion.experts import ExpertsModule
from te_mx.fusion.transposed_linear import TransposedLinear
from te_mx.inspection.metrics import Sums, measure
from te_mx.nn.base import MXModule
from te_mx.nn.checks import FLOATS
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.runtime.arguments import check_dense, is_dense

Key = tuple[str, str, str]  # step, role, gemm


class _Tap(torch.autograd.Function):
    """x, and a path from it to `leaf`, which has no elements: the engine runs backward down to
    every x then, whatever requires a gradient, and computes no gradient of a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] if ctx.needs_input_grad[0] else None), None


class _Frame:
    """A layer that is running, and how many products it has computed. which: the step and the
    number of the next one, where their order does not say."""

    def __init__(self, layer: "Layer") -> None:
        self.layer, self.products = layer, 0
        self.which: tuple[str, int] | None = None


class Watch(TorchFunctionMode):
    """While it is entered, sums of what the layers multiply go into `sums`.

    formats: each with its scale rule. `most`: elements that are read of one tensor. `seen` is
    called after each product of a forward, and after each gradient."""

    def __init__(
        self, layers: "list[Layer]", formats: dict[Format, str], spread: int, most: int | None,
        gradients: bool, seen: Callable[[], Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self.sums: dict[Key, list[Sums]] = {}
        self.leaf = torch.zeros(0, requires_grad=True, device="cpu")
        self._how = formats, spread, most
        self._gradients, self._seen = gradients, seen
        self._running: list[_Frame] = []
        self._weights: set[tuple[str, int]] = set()  # products whose weight was measured
        self._backward = False
        self._handles: list[Any] = []
        self._layers = layers

    # ------------------------------------------------------------------------------------ entering
    def __enter__(self) -> "Watch":
        for layer in self._layers:
            if isinstance(layer.module, ExpertsModule):
                layer.module.__dict__["_watched"] = partial(self._experts, layer, layer.module)
            start, end = self._start(layer), self._end
            on = layer.module.register_forward_pre_hook(start, prepend=True, with_kwargs=True)
            self._handles.append(on)
            self._handles.append(layer.module.register_forward_hook(end, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            layer.module.__dict__.pop("_watched", None)

    def _start(self, layer: "Layer") -> Callable[..., Any]:
        def start(module: "nn.Module", args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> Any:
            self._running.append(_Frame(layer))
            if not layer.grouped:
                return None
            # Splits on a GPU would make one product of all groups, with blocks across them.
            args = tuple(_on_host(arg) if i == 1 else arg for i, arg in enumerate(args))
            return args, {k: _on_host(v) if k == "m_splits" else v for k, v in kwargs.items()}

        return start

    def _end(self, *_: Any) -> None:
        self._running.pop()

    def gradients_of(self, loss: Tensor) -> None:
        """Run backward: measures every g, and accumulates into no parameter's .grad."""
        self._backward = True
        torch.autograd.grad(loss, [self.leaf], allow_unused=True)

    # ----------------------------------------------------------------------------------- measuring
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and self._running:
            return self._of_layer(self._running[-1], *args, **kwargs)
        if func is torch.addmm and self._running and self._running[-1].layer.transposed:
            bias, rows, weight_KN = args
            return self._of_layer(self._running[-1], rows, weight_KN.t(), bias)
        return func(*args, **kwargs)

    def _of_layer(
        self, frame: _Frame, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        steps, index = frame.layer.steps, frame.products
        frame.products += 1
        step = steps[0 if frame.layer.grouped else min(index, len(steps) - 1)]
        return self._product(frame.which or (step, index), input, weight, bias)

    def _experts(
        self, layer: "Layer", module: ExpertsModule, x_RK: Tensor, offs: Tensor, key: str,
        bias_EN: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The products of an experts module, one expert after the other."""
        step, weights_ENK = layer.steps[module._weight_keys.index(key)], module._stack(key)
        frame, made, start = self._running[-1], [], 0
        for expert, end in enumerate(offs.tolist()):
            bias = None if bias_EN is None else bias_EN[expert]
            frame.which = step, expert  # of this call, which comes back to `_of_layer`
            made.append(nn.functional.linear(x_RK[start:end], weights_ENK[expert], bias))
            start = end
        return torch.cat([*made, made[0].new_zeros(x_RK.shape[0] - start, made[0].shape[1])])

    def _product(
        self, which: tuple[str, int], input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        step, _ = which
        again = self._backward  # recomputed by a checkpoint: measured before
        if not again:
            self._read(step, "x", input, FPROP, WGRAD)
            if which not in self._weights:
                self._weights.add(which)
                self._read(step, "w", weight, FPROP, DGRAD)
            self._seen()
        # A matrix is no view: what is written into the result later leaves its hook where it is.
        rows = input.reshape(-1, input.shape[-1])
        if self._gradients and torch.is_grad_enabled():
            rows = _Tap.apply(rows, self.leaf)
        out = nn.functional.linear(rows, weight, bias)
        if self._gradients and out.requires_grad and not again:
            out.register_hook(lambda grad: self._read_gradient(step, grad))
        return out.view(*input.shape[:-1], out.shape[-1])

    def _read_gradient(self, step: str, grad: Tensor) -> None:
        self._read(step, "g", grad, DGRAD, WGRAD)
        self._seen()

    def _read(self, step: str, role: str, value: Tensor, rowwise: int, columnwise: int) -> None:
        """Measure a tensor of two or more dimensions for the GEMMs that read it in each direction,
        those that a backward pass runs only where there is one."""
        check_dense(f"inspect: {role} of {step!r}", value)
        matrix = value.detach().reshape(-1, value.shape[-1]) if value.dim() != 2 else value.detach()
        with torch.no_grad():
            for gemm, rows in ((rowwise, matrix), (columnwise, matrix.t())):
                if gemm == FPROP or self._gradients:
                    made = measure(rows, *self._how)
                    known = self.sums.setdefault((step, role, GEMMS[gemm]), made)
                    for total, more in zip(known, made, strict=True) if known is not made else ():
                        total.add(more)


def _on_host(splits: Any) -> Any:
    return splits.tolist() if isinstance(splits, Tensor) else splits


# ------------------------------------------------------------------------------------------ layers
# The linear layers of a model that are looked at, and a model that is the same afterwards.
# What a forward of a te_mx module leaves on it: as if nothing ran before. And what is off while it
# is looked at: a place of its own for the weight gradient changes no number.
_LEFT = ("_seen", "_ran")
_OFF = ("_converted", "fuse_wgrad_accumulation", "delay_wgrad_compute")


class Layer(NamedTuple):
    """A module with linear steps: their names, "name", or "name.fc1" and "name.fc2"."""

    module: nn.Module
    kind: str
    steps: tuple[str, ...]

    @property
    def grouped(self) -> bool:
        """Whether each of its products is one of the same step."""
        return isinstance(self.module, GroupedLinear)

    @property
    def transposed(self) -> bool:
        """Whether its weight is [in, out]."""
        return isinstance(self.module, TransposedLinear)


def layers_of(
    model: nn.Module, keep: Callable[[nn.Module, str], bool]
) -> tuple[list[Layer], dict[str, str]]:
    """Every nn.Linear and every linear te_mx module, once; and the names of those that cannot be
    looked at, with the reason.

    Raises:
        RuntimeError: a te_mx module holds codes only.
        ValueError: a parameter is on the meta device, or not initialized.
    """
    found: list[Layer] = []
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if not is_layer(module) or not keep(module, name):
            continue
        name = name.replace("_orig_mod.", "") or "(root)"  # torch.compile's
        reason = _why_not(module, name)
        if reason:
            skipped[name] = reason
            continue
        steps: tuple[str, ...] = (name,)
        keys = module._weight_keys if isinstance(module, MXModule) else ()
        if len(keys) > 1:
            steps = tuple(f"{name}.{key.removesuffix('_weight')}" for key in keys)
        kind = f"{type(module).__module__.split('.')[0]}.{type(module).__name__}"
        found.append(Layer(module, kind, steps))
    return found, skipped


def _why_not(module: nn.Module, name: str) -> str:
    if isinstance(module, MXModule):
        module._source.needs_values(
            RuntimeError,
            f"inspect: the layer {name!r} of model holds codes and no high-precision weight; call "
            "te_mx.unfreeze_weights(model, dequantize=True) first, or inspect before weights are "
            "frozen",
        )
    for key, value in module.named_parameters(recurse=False):
        if is_lazy(value) or value.is_meta:
            raise ValueError(
                f"inspect: parameter {key} of {name!r} in model has no values (it is lazy or on "
                "the meta device); load the model first"
            )
        if type(value) not in (nn.Parameter, Tensor) or not is_dense(value):
            return f"its {key} is a {type(value).__name__}, not a plain dense tensor"
        if value.dtype not in FLOATS:
            return f"its {key} is {value.dtype}, not float32, bfloat16 or float16"
    return ""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A model whose buffers, and what te_mx modules remember, are what they were afterwards; random
    numbers of torch and of Python go on as if nothing had run. te_mx modules run in high precision
    inside."""
    places = {t.device for t in (*model.parameters(), *model.buffers())}
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        for place in places:
            if place.type not in ("cpu", "meta"):
                stack.callback(*_generator(place))
        for module in model.modules():
            stack.callback(_restore_buffers, module, dict(module._buffers), _copies(module))
            if isinstance(module, MXModule):
                words = module.__dict__
                held = {key: words[key] for key in (*_LEFT, *_OFF) if key in words}
                stack.callback(_restore_words, words, held)
                _restore_words(words, dict.fromkeys(_OFF, False))
        # A region where MXFP8 is off wins over recipes that are bound.
        stack.enter_context(entered_again(Region(None, None, active_region())))
        yield


def _copies(module: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        return {k: b.clone() for k, b in module._buffers.items() if b is not None}


def _restore_buffers(module: nn.Module, held: dict[str, Any], copies: dict[str, Tensor]) -> None:
    """The same tensors, with the values that they had."""
    module._buffers.clear()
    module._buffers.update(held)
    with torch.no_grad():
        for key, value in copies.items():
            now = held[key]
            if now.shape != value.shape:
                now.resize_(value.shape)
            if not _same(now, value):
                now.copy_(value)


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape have the same bytes. What did not change is not written,
    because someone else's backward may be waiting for it."""
    if not is_dense(x):
        return False
    one, other = (t.resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (x, y))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _generator(place: torch.device) -> tuple[Any, ...]:
    """What to call to have the random numbers of a device go on from here."""
    module = torch.get_device_module(place)
    if not signature(module.get_rng_state).parameters:  # kinds of which there is only one
        return module.set_rng_state, module.get_rng_state()
    return module.set_rng_state, module.get_rng_state(place), place


def _restore_words(words: dict[str, Any], held: dict[str, Any]) -> None:
    for key in (*_LEFT, *_OFF):
        words.pop(key, None)
    words.update(held)
