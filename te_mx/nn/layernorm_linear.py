"""te_mx.LayerNormLinear: a normalization and a linear layer in one module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from te_mx.autograd import node
from te_mx.autograd.layer import Call, Parameters, Weights, run_layer
from te_mx.autograd.node import needs_gradient
from te_mx.context.region import is_tracing
from te_mx.nn.arguments import Options, refuse
from te_mx.nn.norm_base import NormModule, default_init
from te_mx.nn.tensor_parallel import COLUMN, ROW
from te_mx.recipes.settings import Settings
from te_mx.weights import split


class LayerNormLinear(split.SplitWeight, NormModule):
    """``y = norm(x) @ weight.T + bias``: torch's own functions, and inside `te_mx.autocast` in the
    formats of its recipe (MXFP8 by default).

    There the normalized input z is computed in fp32, rounded to the dtype of the result and
    quantized from there, bit for bit as the normalization and a te_mx.Linear one after the other;
    but x is read once and z is not written. See te_mx.Linear for what is quantized and saved.

    Parameters: ``layer_norm_weight`` [in_features], ``layer_norm_bias`` [in_features] (LayerNorm
    only), ``weight`` [out_features, in_features] and ``bias`` [out_features], as Transformer Engine
    names them and with its initialization (weights normal with standard deviation 0.023, biases 0).
    ``_extra_state`` of its checkpoints is accepted and ignored.

    Args:
        in_features, out_features: any sizes; they need not divide by 32.
        bias: with a bias.
        device, dtype: of the parameters; dtype is fp32, bf16 or fp16.
        eps: added to the variance (LayerNorm) or the mean square (RMSNorm).
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: scale by ``1 + layer_norm_weight``, which then starts at 0.
        return_layernorm_output: also return z, which has a gradient of its own.
        return_bias: return the bias instead of adding it.
        init_method: called with the weight instead of the default initialization.
        params_dtype: Transformer Engine's name for `dtype`.
        name: shown in errors and by `te_mx.audit`.
        fuse_wgrad_accumulation, delay_wgrad_compute, parameters_split: as for te_mx.Linear.
        tp_group, tp_size, parallel_mode, sequence_parallel: the layer is shared by the ranks of a
            process group, as in Transformer Engine: docs/distributed.md. The group may come later,
            by `set_tensor_parallel_group`.
        transformer_engine: further arguments of Transformer Engine's LayerNormLinear, at their
            defaults.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name, or arguments that
            disagree.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """

    init_method: Callable[[Tensor], Any] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        parameters_split: Iterable[str] | Mapping[str, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        **transformer_engine: Any,
    ) -> None:
        super().__init__()
        options = Options("LayerNormLinear", locals(), "in_features", "out_features")
        if parallel_mode == ROW:
            raise NotImplementedError(
                'te_mx.LayerNormLinear: parallel_mode="row" needs an input sharded along its '
                'features, which cannot be normalized; use "column", or te_mx.Linear behind a '
                "normalization"
            )
        in_features, out_features = options.sizes
        out_features = options.part(COLUMN, "out_features", out_features)
        self.parallel_mode = parallel_mode
        self._start(in_features, eps, normalization, zero_centered_gamma)
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        options.keep(self)
        device, dtype = options.device, options.dtype
        self._norm_parameters(device, dtype)
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        if parameters_split is not None:
            self._split_into(parameters_split, out_features, options.ranks(COLUMN))
        self._finish_building()
        if delay_wgrad_compute:
            self._start_delaying()
        self._share(parallel_mode, options.how, tp_group)

    def _initialize(self) -> None:
        """Transformer Engine's initialization: see the class."""
        self.reset_layer_norm_parameters()
        init = self.init_method or default_init
        for weight in self._parts("weight"):
            init(weight)
        for bias in self._parts("bias"):
            nn.init.zeros_(bias)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """inp [..., in_features] -> [..., out_features]; then the bias under `return_bias`, then z
        [..., in_features] under `return_layernorm_output`.

        Args:
            inp: fp32, bf16 or fp16; any strides.
            is_first_microbatch: as for te_mx.Linear.
            fp8_output, fp8_grad: must be False.

        The dtype of the result and of z is torch.autocast's where that is on, else that of `inp`.

        Raises:
            ValueError: the last dimension of `inp` is not in_features, or a parameter has another
                shape than the module's or lies on another device than `inp`.
            TypeError: the dtype of `inp` or of a parameter cannot be quantized.
            RuntimeError: a backward pass recomputes it and cannot know the recipe, see
                te_mx.autocast.
            NotImplementedError: forward-mode AD or a transform of torch.func follows `inp` or a
                parameter, in MXFP8; one level of grad, grad_and_value or vjp may.
        """
        if not (fp8_output is fp8_grad is False or isinstance(inp, Proxy)):
            refuse("LayerNormLinear", "fp8_output", fp8_output)
            refuse("LayerNormLinear", "fp8_grad", fp8_grad)
        settings, made = self._enter(inp, is_first_microbatch)
        if settings is None:
            return made
        want_z = self.return_layernorm_output
        out, bias, z = self._steps(inp, is_first_microbatch, settings, want_z)
        return self._returned(out, bias, z) if want_z or self.return_bias else out

    def _with_normalized(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        """(y, z): what `forward` makes of `inp`, the bias added unless `return_bias` says
        otherwise, and the normalized input z. For adapters, whose own products start from z.

        Raises:
            NotImplementedError: the module is shared by several ranks, or a transform of torch.func
                follows `inp` or a parameter.
        """
        if self._is_spread(inp):
            raise NotImplementedError(
                f"{self._label()} is shared by several ranks, where z is not returned; call forward"
            )
        settings = self._settings()
        if settings is None:
            out, _, z = self._plain(inp, None)
            return out, z
        if node.active():
            self._refuse_transforms(inp)
        out, _, made = self._steps(inp, None, settings, True)
        assert made is not None
        return out, made

    def _high_precision(self, inp: Tensor, is_first_microbatch: bool | None) -> Any:
        return self._returned(*self._plain(inp, is_first_microbatch))

    def _plain(self, inp: Tensor, first: bool | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """y, the bias and z in high precision."""
        weight, bias = self._weight_and_bias()
        z = self._plain_norm(inp)
        added = None if self.return_bias else bias
        return self._plain_linear(z, "weight", weight, added, first), bias, z

    def _steps(
        self, inp: Tensor, first: bool | None, settings: Settings, want_z: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """y, the bias, and z at least if it is wanted."""
        source = self._source
        weight, bias = self._weight_and_bias()
        added = None if self.return_bias else bias
        norm_weight, norm_bias = self._held("layer_norm_weight", "layer_norm_bias")
        in_features, out_features = self.in_features, self.out_features
        usual = self._are_usual(inp, in_features, (
            (norm_weight, None if self.normalization is None else (in_features,)),
            (norm_bias, None if norm_bias is None else (in_features,)),
            (weight, (out_features, in_features)),
            (added, None if added is None else (out_features,)),
        ))  # fmt: skip
        if not usual:
            self._check(inp, "in_features", norm_weight, norm_bias)
            source.check(self, "weight", weight, (out_features, in_features), inp.device)
            if added is not None:
                self._check_parameter("bias", added, (out_features,), inp.device)
        step = self._step(inp)
        tag = self._tag_now() if is_tracing() or self._tag < 0 else self._tag
        need_dx = needs_gradient(inp, norm_weight, norm_bias)
        plain = not (need_dx or needs_gradient(added))
        (made,) = source.prepared(self, {"weight": need_dx}, inp, settings, first, plain)
        settings, kept, few = made
        if few is not None:
            z, beside = self._few_normalized(inp, few)
            y = few.run(z, added, step.dtype, tag, **beside)
            if y is not None:
                return y, bias, z
        sink = None
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute:
            sink = source.grad_target(self, self._gradients_of("weight", weight), first)
        call = Call(step, None, settings, want_z, (tag, -1), self._tokens)
        parameters = Parameters(norm_weight, norm_bias, weight, added)
        out, normalized = run_layer(inp, parameters, Weights((kept, None), (sink, None)), call)
        return out, bias, normalized

    def _described(self) -> str:
        shown = (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, {self._norm_repr()}"
        )
        return shown + self._split_repr()
