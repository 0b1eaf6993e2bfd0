"""Watching a model run: every product of its linear layers is measured when it is computed.

nn.Linear and te_mx's modules, in high precision, all multiply by torch.nn.functional.linear: what
it is given inside of a layer is that layer's x and w, also where a module normalizes or activates
first, and the gradient of what it returns is g. The Conv1D of GPT-2 calls torch.addmm, and stacked
experts leave their products to whoever watches them. Only numbers are kept."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from te_mx.formats.format import in_blocks
from te_mx.formats.mxfp8 import E4M3
from te_mx.formats.nvfp4 import TensorScaledFormat
from te_mx.fusion.experts import ExpertsModule
from te_mx.fusion.transposed_linear import TransposedLinear
from te_mx.layouts import aligning
from te_mx.nn.base import MXModule
from te_mx.nn.checks import FLOATS
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.runtime.arguments import check_dense, is_dense

# --------------------------------------------------------------------------------------- measuring
# What quantizing a matrix to a format costs: sums over its elements and blocks, and what they say.
#
# Everything is asked of the Format object, so a format that is registered tomorrow is measured
# too.
STRIPE = 128  # rows that are quantized together at least: those of a tile of every packed layout
CHUNK = 1 << 20  # elements that are quantized together at most, unless a stripe has more
# |x| above the largest value of its block by less than this is no saturation: a scale in fp32 is
# rounded, and so is what the codes stand for.
SLACK = 2.0**-20
_LOWEST, _EXPONENTS = -300, 600  # exponents of scales that the histogram has room for


@dataclass
class Sums:
    """Sums over everything that was quantized to one format; they add up.

    signal, noise: of x^2 and of (x - q)^2, over the elements that can be compared. Counts of
    elements: `nonfinite` are NaN or Inf in x; `lost` are finite in x and not in q, because their
    block holds such a one (or they are rounded to what fp32 does not hold). exponents: how many
    blocks that are not all zero have a scale in [2^e, 2^(e+1)). tiles: how many have each class of
    the layout `aligning` (its `class_names`); None for formats that it has no classes of."""

    elements: int = 0
    signal: float = 0.0
    noise: float = 0.0
    saturated: int = 0
    subnormal: int = 0
    zeroed: int = 0
    nonfinite: int = 0
    lost: int = 0
    exponents: Counter[int] = field(default_factory=Counter)
    tiles: list[int] | None = None

    def add(self, other: "Sums") -> None:
        """Add what was measured of more elements."""
        for name in ("elements", "signal", "noise", *_COUNTED, "nonfinite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.exponents += other.exponents
        if other.tiles is not None:
            self.tiles = [a + b for a, b in zip(self.tiles or [0] * 4, other.tiles, strict=True)]

    @property
    def sqnr(self) -> float | None:
        """10 log10(signal / noise) in dB; inf where nothing was rounded, None without a signal."""
        if self.signal == 0:
            return None
        return math.inf if self.noise == 0 else 10 * math.log10(self.signal / self.noise)

    def share(self, count: int) -> float:
        """A count of elements as a share of all."""
        return count / self.elements if self.elements else 0.0

    def exponent(self, quantile: float) -> int | None:
        """The exponent that this share of the blocks does not exceed; None without blocks."""
        wanted, seen = quantile * self.exponents.total(), 0
        for exponent in sorted(self.exponents):
            seen += self.exponents[exponent]
            if seen >= wanted:
                return exponent
        return None


_COUNTED = ("saturated", "subnormal", "zeroed", "lost")


def stripes(rows: int, k: int, most: int | None) -> Iterator[tuple[int, int]]:
    """(start, end) of the rows that are read: all of them, or, where `most` elements are to be read
    and the matrix has more, whole stripes that lie evenly over it, one at least."""
    per_chunk = max(1, CHUNK // (STRIPE * max(k, 1)))
    count = -(-rows // STRIPE)
    wanted = count
    if most is not None and rows * k > most:
        wanted = min(count, max(1, most // (STRIPE * k)))
    if wanted == count:
        step = STRIPE * per_chunk
        yield from ((start, min(start + step, rows)) for start in range(0, rows, step))
        return
    for i in range(wanted):
        start = (2 * i + 1) * count // (2 * wanted) * STRIPE  # the middle of each part
        yield start, min(start + STRIPE, rows)


def measure(x: Tensor, formats: dict[Format, str], spread: int, most: int | None) -> list[Sums]:
    """The sums of x [rows, k], blocks along k, under each format with its scale rule; `spread` is
    that of Hopper's tiles. Memory: some 40 bytes for each of CHUNK elements.

    Formats scale blocks, and rows or the tensor by their largest magnitude, so whole stripes of
    rows are quantized by themselves."""
    totals = [Sums() for _ in formats]
    if not x.numel():
        return totals
    whole = None
    if any(fmt.tensor_scaled for fmt in formats):
        whole = torch.stack(
            [_largest(x[start:end]) for start, end in stripes(len(x), x.shape[1], None)]
        )
    for start, end in stripes(x.shape[0], x.shape[1], most):
        part = x[start:end].to(torch.float32).contiguous()
        finite = part.isfinite()
        largest = float(_largest(part))
        for total, (fmt, rule) in zip(totals, formats.items(), strict=True):
            made = _quantized(part, fmt, rule, whole)
            total.add(_measure(part, finite, largest, fmt, made, spread))
    return totals


def _largest(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x.abs(), 0).amax().to(torch.float32)


def _quantized(
    x: Tensor, fmt: Format, rule: str, whole: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales as they are stored (fp32 where a tensor scale multiplies them) and values; of
    part of a tensor with these largest magnitudes."""
    k = x.shape[1]
    if not isinstance(fmt, TensorScaledFormat) or whole is None:
        codes, scales = fmt.quantize(x, rule)
        return codes, scales, fmt.dequantize(codes, scales, k, torch.float32)
    shared = None if fmt.by_rows else lambda _: whole.amax().view(1, 1)
    codes, scales, tensor_scale = fmt.quantize_parts(x, rule, None, shared)
    values = fmt.dequantize(codes, scales, k, torch.float32) * tensor_scale
    return codes, E4M3.decode(scales) * tensor_scale, values


def _measure(
    x: Tensor, finite: Tensor, largest: float, fmt: Format, made: tuple[Tensor, Tensor, Tensor],
    spread: int,
) -> Sums:  # fmt: skip
    element, (packed, scales, q) = fmt.element, made
    codes = fmt.unpack(packed, x.shape[1])
    magnitude = codes & (element.sign - 1)
    known = finite & q.isfinite()

    # Squares of gradients leave the range of fp32, and not every device has fp64: x and q are
    # brought near 1 first, which is exact.
    power = min(max(-math.frexp(largest)[1], -126), 126)
    scaled = torch.where(known, x, 0) * 2.0**power
    error = scaled - torch.where(known, q, 0) * 2.0**power
    signal, noise = (float(v.square_().sum()) for v in (scaled, error))

    used = known & (magnitude > 0)
    normal = magnitude >= 1 << element.mantissa_bits
    clamped = (magnitude == element.max_code) & (x.abs() > q.abs() * (1 + SLACK))
    counts = (
        known & clamped, used & ~normal, known & (magnitude == 0) & (x != 0), finite & ~known,
        ~finite,
    )  # fmt: skip
    saturated, subnormal, zeroed, lost, nonfinite = torch.stack(
        [c.count_nonzero() for c in counts]
    ).tolist()
    tiles = None
    layout = aligning(spread)
    if layout.has_classes(fmt):
        classes = layout.classes(fmt, codes, scales).flatten().int()
        tiles = torch.bincount(classes, minlength=len(layout.class_names)).tolist()
    return Sums(
        x.numel(), math.ldexp(signal, -2 * power), math.ldexp(noise, -2 * power), saturated,
        subnormal, zeroed, nonfinite, lost, _exponents(scales, used, fmt), tiles,
    )  # fmt: skip


def _exponents(scales: Tensor, used: Tensor, fmt: Format) -> Counter[int]:
    """Exponents of the scales of blocks with a code that is not zero."""
    inside = in_blocks(used, fmt.scaling.block).any(3).any(1)
    if fmt.scaling.scale == "e8m0":
        exponents = scales.int() - 127
    else:
        exponents = torch.frexp(scales.float())[1] - 1
    found = torch.bincount(exponents[inside].long() - _LOWEST, minlength=_EXPONENTS).tolist()
    return Counter({i + _LOWEST: count for i, count in enumerate(found) if count})


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
