"""What te_mx.LayerNormLinear and te_mx.LayerNormMLP share, which is all but names and sizes: a
normalization and one linear layer behind it, or two with an activation between them.

Normalizations outside of MXFP8: torch's own functions, in fp32 where torch's would add up the
gradients of 16-bit parameters in 16 bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_mx._ops.fused import act_quantize_2d
from te_mx._ops.library import facts_of
from te_mx.autograd import input_cache, linear_recipe
from te_mx.autograd.activation import activation
from te_mx.autograd.grad_target import Queue
from te_mx.autograd.layer import Call, Parameters, Weights, run_layer
from te_mx.autograd.linear_recipe import GEMMS
from te_mx.autograd.node import needs_gradient
from te_mx.autograd.norm import NormStep, normalized
from te_mx.autograd.saved import flatten
from te_mx.context.region import backward_pass_id, is_tracing, output_dtype
from te_mx.dispatch.fused import NORMS, Activation, ActStep, Norm, Target
from te_mx.dispatch.kernels import derive, derived
from te_mx.dispatch.linear import Gate
from te_mx.nn import activations
from te_mx.nn.arguments import Options
from te_mx.nn.base import MXModule
from te_mx.nn.linear import Linear
from te_mx.recipes.resolve import DEFAULT_SETTINGS
from te_mx.recipes.settings import Mixed, Settings
from te_mx.runtime.arguments import check_number, check_one_of
from te_mx.weights.decode import DecodeCall
from te_mx.weights.gradients import grad_target
from te_mx.weights.source import Prepared
from te_mx.weights.traced import Traced

_known = derived()
NOTHING_KEPT = Weights()
NARROW = torch.bfloat16, torch.float16


def sums_in_fp32(x: Tensor) -> bool:
    """Whether `layer_norm` computes in fp32 what torch would add up in 16 bits."""
    return x.device.type == "cpu" and x.dtype in NARROW


def layer_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm over the last dimensions `shape`; of x's dtype or, on CPUs, in fp32 for a 16-bit x.

    There torch adds up the gradients of weight and bias, one number for every row, in the dtype of
    x: of 8,192 ones in bf16 that makes 256. Here x, weight and bias are fp32 inside, and each
    gradient is rounded once, to the dtype of what it belongs to."""
    if sums_in_fp32(x):
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    return F.layer_norm(x, shape, weight, bias, eps)


_STD = 0.023  # of Transformer Engine's default weights


def default_init(weight: Tensor) -> Tensor:
    """Transformer Engine's default initialization of a weight."""
    return nn.init.normal_(weight, 0.0, _STD)


class NormModule(MXModule, nn.Module):
    """A module that normalizes its input and runs linear steps on the result."""

    _norms: tuple[str | None, ...] = NORMS
    _linear_names: tuple[str, ...] = ("weight", "bias")  # of the parameters of each linear layer
    _size_name = "in_features"
    _act: Activation | None = None  # between two layers
    _call: Any = (), None  # what the last call was made of, and itself, for others like it
    layer_norm_weight: nn.Parameter | None
    layer_norm_bias: nn.Parameter | None
    return_bias: bool
    return_layernorm_output: bool
    init_method: Callable[[Tensor], Any] | None
    output_layer_init_method: Callable[[Tensor], Any] | None = None

    def _start(self, options: Options, size: int) -> None:
        """Attributes of all such modules; called before the parameters are made."""
        owner, given = f"te_mx.{type(self).__name__}", options.given
        check_one_of(f"{owner}: normalization", given["normalization"], self._norms)
        self.eps = check_number(f"{owner}: eps", given["eps"], 0)
        self.normalization = given["normalization"]
        self.zero_centered_gamma = given["zero_centered_gamma"]
        self._size = size
        self.use_bias = given["bias"]
        options.keep(self)

    def _make_parameters(self, options: Options, *shapes: tuple[int, int]) -> None:
        """Those of the normalization and of linear layers of these shapes."""

        def make(name: str, shape: Any, there: bool = True) -> None:
            value = torch.empty(shape, device=options.device, dtype=options.dtype)
            self.register_parameter(name, nn.Parameter(value) if there else None)

        make("layer_norm_weight", self._size, self.normalization in NORMS)
        make("layer_norm_bias", self._size, self.normalization == "LayerNorm")
        for i, shape in enumerate(shapes):
            make(self._linear_names[2 * i], shape)
            make(self._linear_names[2 * i + 1], shape[0], self.use_bias)

    def _complete(self, options: Options) -> None:
        """The end of a constructor."""
        self._finish_building()
        if options.given["delay_wgrad_compute"]:
            self._start_delaying()
        self._share(options.mode, options.how, options.given["tp_group"])

    def _initialize(self) -> None:
        """Transformer Engine's initialization: see the classes."""
        self.reset_layer_norm_parameters()
        inits = self.init_method or default_init, self.output_layer_init_method or default_init
        zeros = (nn.init.zeros_,) * len(inits)
        for names, of in ((self._linear_names[::2], inits), (self._linear_names[1::2], zeros)):
            for name, init in zip(names, of, strict=False):
                for part in self._parts_of(name):
                    value = getattr(self, part, None)
                    if value is not None:
                        init(value)

    def reset_layer_norm_parameters(self) -> None:
        """Weights that scale by 1 (0 where they are zero-centered), biases 0."""
        if self.layer_norm_weight is None:
            return
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    # --------------------------------------------------------------------------- running a forward
    def _step(self, inp: Tensor) -> NormStep:
        norm = None if self.normalization is None else Norm(self.normalization, self.eps)
        return NormStep(norm, self.zero_centered_gamma, output_dtype(inp))

    def _plain_norm(self, inp: Tensor) -> Tensor:
        """The normalization outside te_mx.autocast: torch's, in the dtype of the result."""
        if self.normalization is None:
            return inp
        weight: Tensor | None = self.layer_norm_weight
        bias: Tensor | None = self.layer_norm_bias
        if weight is None:
            self._refuse_parameter("layer_norm_weight", None, (self._size,), inp.device)
        is_layer_norm = self.normalization == "LayerNorm"
        wide = weight.dtype != inp.dtype or (is_layer_norm and sums_in_fp32(inp))
        if wide and weight.dtype in NARROW:
            weight = weight.float()  # torch mixes dtypes where the parameters are fp32
            bias = bias.float() if bias is not None and bias.dtype in NARROW else bias
        if self.zero_centered_gamma:
            weight = weight + 1
        shape = (self._size,)
        if is_layer_norm:
            z = layer_norm(inp, shape, weight, bias, self.eps)
        else:
            z = nn.functional.rms_norm(inp, shape, weight, self.eps)
        return z.to(output_dtype(inp))

    def _normalized(self, inp: Tensor) -> Tensor:
        """The normalized input of a step that quantizes, itself; differentiable."""
        weight, bias, step = self.layer_norm_weight, self.layer_norm_bias, self._step(inp)
        if weight is None:
            return inp.to(step.dtype)
        target = Target("", "", DEFAULT_SETTINGS.scale_rule)
        return normalized(inp, weight, bias, step, target)

    def _few_normalized(self, inp: Tensor, few: Any) -> tuple[Tensor, dict[str, Any]]:
        """The normalized input of a product of few rows, and what that may read beside it: the same
        quantized, in a graph of any number of rows."""
        target = few.target(inp.device)
        if target is None:
            return self._normalized(inp), {}
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        made = self._step(inp).forward(flatten(inp), weight, bias, True, target)
        assert made.z is not None
        return made.z.view(inp.shape), {"row": made.quantized.row}

    def _few(
        self, inp: Tensor, p: Parameters, products: tuple[Any, Any], tags: tuple[int, int]
    ) -> tuple[Tensor, Tensor] | None:
        """The result and z where there are products of few rows, without quantized steps. An
        activation that is not gated runs inside of the first, where that quantizes."""
        (one, two), act, dtype = products, self._act, output_dtype(inp)
        z, beside = self._few_normalized(inp, one)
        if act is None:
            y = one.run(z, p.b1, dtype, tags[0], **beside)
        elif one.as_is:
            h = one.run(z, p.b1, dtype, tags[0])
            return two.run(activations.plain(h, act), p.b2, dtype, tags[1]), z
        else:
            y = one.run(z, p.b1, dtype, tags[0], act=None if act.gated else act.name, **beside)
            if y is not None and act.gated:
                y = run_gated(two, [y], act, p.b2, tags[1])
            elif y is not None:
                y = two.run(y, p.b2, dtype, tags[1])
        return None if y is None else (y, z)

    def _tags(self) -> tuple[int, int]:
        """The first slots of both layers."""
        tag = self._tag_now()
        return tag, tag + len(GEMMS) if tag >= 0 and self._act is not None else -1

    def _forward(self, inp: Tensor, first: bool | None) -> Any:
        settings, made = self._enter(inp, first)
        if settings is None:
            return made
        if type(settings) is Mixed:
            return self._in_two(inp, first, settings)
        want_z = self.return_layernorm_output
        out, bias, z = self._steps(inp, first, settings, want_z)
        return self._returned(out, bias, z) if want_z or self.return_bias else out

    def _in_two(self, inp: Tensor, first: bool | None, settings: Mixed) -> Any:
        """A forward whose layers run with different recipes."""
        raise NotImplementedError

    def _steps(
        self, inp: Tensor, first: bool | None, settings: Settings, want_z: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """y, the last bias, and z at least if it is wanted."""
        source, weights = self._source, NOTHING_KEPT
        p, bias, facts = self._read(inp)
        prepared = source.prepared(self, inp, p, settings, first)
        if prepared is not None:
            one, two = prepared if len(prepared) > 1 else (*prepared, Prepared(settings))
            if one.product is not None:
                made = self._few(inp, p, (one.product, two.product), self._tags())
                if made is not None:
                    return made[0], bias, made[1]
            settings, weights = one.settings, Weights((one.kept, two.kept))
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute:
            queue = self._queue_of_call()
            grad_targets: Any = [None, None]
            for i, key in enumerate(self._weight_keys):
                parts = self._gradients_of(key, p[2 + 2 * i])
                # Of the transforms that the source looks for, the start of the forward asked.
                grad_targets[i] = grad_target(self, parts, first, queue, source.owned)
            weights = Weights(weights.kept, tuple(grad_targets))
        out, z = run_layer(inp, p, weights, self._call_of(inp, settings, want_z), facts)
        return out, bias, z

    def _call_of(self, inp: Tensor, settings: Settings, want_z: bool) -> Call:
        """What a call fixes; that of the last one where it fixed the same."""
        given = (
            self.normalization, self.eps, self.zero_centered_gamma, self._act, output_dtype(inp),
            settings, want_z, self._tag_now(), self._tokens,
        )  # fmt: skip
        known, call = self._call
        if known != given:
            call = Call(self._step(inp), self._act, settings, want_z, self._tags(), self._tokens)
            if not is_tracing():  # checkpoints in compiled code may change nothing
                self.__dict__["_call"] = given, call
        return call

    def _needs(self, inp: Tensor, p: Parameters) -> tuple[dict[str, bool], bool]:
        """Of each weight, whether what it multiplies has a gradient; whether nothing has one, so
        that kernels for few rows may be looked for."""
        keys, need, added = self._weight_keys, needs_gradient(inp, *p[:2]), p.b1
        needs = {keys[0]: need}
        if self._act is not None:
            needs[keys[1]] = need = need or needs_gradient(p.w1, p.b1)
            added = p.b2
        return needs, not (need or needs_gradient(added))

    def _high_precision(self, inp: Tensor, first: bool | None) -> Any:
        return self._returned(*self._plain(inp, first))

    def _plain(self, inp: Tensor, first: bool | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """y, the last bias and z in high precision."""
        layers, queue = self._linears()[0], self._queue_of_call()
        bias = layers[-1]
        if self.return_bias:
            layers[-1] = None
        z = y = self._plain_norm(inp)
        for i, key in enumerate(self._weight_keys):
            if i and self._act is not None:
                y = activations.plain(y, self._act)
            weight, added = layers[2 * i : 2 * i + 2]
            y = self._plain_linear(y, key, weight, added, first, queue)
        return y, bias, z

    def _queue_of_call(self) -> Queue | None:
        """Where the weight gradients of one call wait, if they do."""
        queue = self._wgrad_queue()
        together: Any = queue if queue is None or self._act is None else Together(queue)
        return together

    def _returned(self, out: Tensor, bias: Tensor | None, z: Tensor | None) -> Any:
        extra: tuple[Tensor | None, ...] = (bias,) if self.return_bias else ()
        extra += (z,) if self.return_layernorm_output else ()
        return (out, *extra) if extra else out

    # ----------------------------------------------------------------------------- checks and names
    def _linears(self) -> tuple[list[Any], tuple[tuple[int, int], ...]]:
        """Weight and bias of every linear layer, whole, and the shapes that the weights have."""
        raise NotImplementedError

    def _read(self, inp: Tensor) -> tuple[Any, Tensor | None, Any]:
        """The Parameters that a quantized forward of inp reads, checked; the last bias, which may
        not be added; and what stands for the facts of all these tensors. One look where such were
        usual before."""
        size, norms = self._size, self._held("layer_norm_weight", "layer_norm_bias")
        layers, shapes = self._linears()
        bias, key, facts = layers[-1], None, None
        if self.return_bias:
            layers[-1] = None
        read = Parameters(*norms, *layers)
        if type(inp) is Tensor and not (is_tracing() or inp.is_nested):
            key = (
                "usual", size, self.normalization is None, shapes, inp.layout,
                facts_of(inp, *norms, *layers),
            )  # fmt: skip
            facts = _known.get(key)
        if facts is None:
            wanted: list[Any] = [None if self.normalization is None else (size,)]
            wanted.append(None if norms[1] is None else (size,))
            for i, shape in enumerate(shapes):
                wanted += shape, None if layers[2 * i + 1] is None else shape[:1]
            if not self._are_usual(inp, size, tuple(zip(read, wanted, strict=False))):
                self._check_all(inp, read, wanted)
            elif key is not None:
                facts = derive(key, object())
        return read, bias, facts

    def _check_all(self, inp: Tensor, read: Parameters, shapes: list[Any]) -> None:
        self._check_shape(inp, self._size_name, self._size)
        self._check_kind(inp)
        names = "layer_norm_weight", "layer_norm_bias", *self._linear_names
        for name, value, shape in zip(names, read, shapes, strict=False):
            if name in self._weight_keys:
                self._source.check(self, name, value, shape, inp.device)
            elif shape is not None:
                self._check_parameter(name, value, shape, inp.device)

    def _norm_repr(self) -> str:
        shown = f"eps={self.eps}, normalization={self.normalization!r}"
        return shown + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")


class Together:
    """A queue for the weight gradients of one call: those of one backward pass go into `queue` as
    one, for one `backward_dw`."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._pass = queue, -1
        self._runs: list[Callable[[], None]] = []

    def append(self, run: Callable[[], None]) -> None:
        now = backward_pass_id()
        if self._runs and now == self._pass:
            self._runs.append(run)
            return
        self._pass = now
        runs = self._runs = [run]

        def run_all() -> None:
            while runs:
                runs.pop(0)()

        self._queue.append(run_all)


# -------------------------------------------------------------------------------------- frozen mlp
# A gated MLP block of frozen layers, as when text is generated. On few rows the activation and its
# gate have no kernel of their own: the last product computes them as it reads its input.
# Each product is that of its layer, and what is rounded where is as in autograd/layer.py:
# act(gate) * up is computed in fp32 and rounded once.
def run_frozen(
    act: Activation, layers: list[Linear], x: Tensor, settings: Settings
) -> Tensor | None:
    """The block of these layers, the last one behind the activation; None where its own forward is
    to run."""
    *first, last = layers
    if not act.gated or output_dtype(x) != x.dtype or x.shape[-1:] != (first[0].in_features,):
        return None
    if not all(one._source.decodes for one in layers):
        return None
    bias = last.whole_bias()
    held = [x, bias, *(one._parameters.get("weight") for one in layers)]
    if needs_gradient(*held):
        return None
    found, h = last._source.ready(last, x, settings), [one(x) for one in first]
    if found is not None and act.base in found.kernel.gates:
        return run_gated(found, h, act, bias, last._tag_now())
    # Of many rows, what the last layer would quantize its input to is made with it; where codes are
    # all that it has of its weight, nothing else.
    source: Any = last._source
    alone = source.dropped and last._tokens is None
    target = linear_recipe.plan_input(x.device, settings, False).target
    rows = flatten(h[0] if len(h) == 1 else torch.cat(h, -1))
    made = act_quantize_2d(ActStep(rows, None, act, x.dtype, not alone, target))
    if alone and made.quantized.row is not None:
        given = made.quantized.row, source.row(last, "weight", settings)
        y = linear_recipe.fprop(*given, bias, settings, x.dtype, last._tag_now())
        return y.view(*x.shape[:-1], -1)
    assert made.out is not None
    z = made.out.view(*x.shape[:-1], -1)
    input_cache.open_for(z)
    input_cache.put(z, target, made.quantized)
    return last(z)


def run_gated(
    found: DecodeCall | Traced, h: list[Tensor], act: Activation, bias: Tensor | None, tag: int
) -> Tensor | None:
    """act(h[0]) * h[1] times a weight, in the dtype of h; of one h, its halves. None where native
    code does not take it. Compiled code has the activation as an op of its own: the same bits."""
    x, values = h if len(h) == 2 else h[0].chunk(2, -1)
    dtype, shape = x.dtype, x.shape
    if isinstance(found, DecodeCall) and act.base in found.kernel.gates:
        gate = Gate(values, act.base)
        made = found.run(x, bias, dtype, tag, gate=gate)
        if made is not None:
            return made
    rows: Any = h[0] if len(h) == 1 else torch.cat(h, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    target = found.target(x.device) if isinstance(found, Traced) else None
    if target is None:
        return found.run(activation(rows, act).view(shape), bias, dtype, tag)
    parts = act_quantize_2d(ActStep(rows, None, act, dtype, True, target))
    assert isinstance(found, Traced) and parts.out is not None
    return found.run(parts.out.view(shape), bias, dtype, tag, row=parts.quantized.row)
