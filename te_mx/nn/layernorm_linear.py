"""te_mx.LayerNormLinear: a normalization and a linear layer in one module."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from te_mx.autograd import node
from te_mx.nn.arguments import Options, refuse
from te_mx.nn.norm_base import NormModule
from te_mx.nn.tensor_parallel import COLUMN, ROW
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
        transformer_engine: Transformer Engine's further arguments, at their defaults.

    Raises:
        TypeError, ValueError: a wrong type or value, by name, or arguments that disagree.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """

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
        self._start(options, in_features)
        self.in_features, self.out_features = in_features, out_features
        self._make_parameters(options, (out_features, in_features))
        if parameters_split is not None:
            self._split_into(parameters_split, out_features, options.ranks(COLUMN))
        self._complete(options)

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
            RuntimeError: backward recomputes it and cannot know the recipe, see te_mx.autocast.
            NotImplementedError: forward-mode AD or a transform of torch.func follows `inp` or a
                parameter, in MXFP8; one level of grad, grad_and_value or vjp may.
        """
        if not (fp8_output is fp8_grad is False or isinstance(inp, Proxy)):
            refuse("LayerNormLinear", "fp8_output", fp8_output)
            refuse("LayerNormLinear", "fp8_grad", fp8_grad)
        return self._forward(inp, is_first_microbatch)

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

    def _linears(self) -> tuple[list[Any], tuple[tuple[int, int], ...]]:
        return [*self._weight_and_bias()], ((self.out_features, self.in_features),)

    def _described(self) -> str:
        shown = (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, {self._norm_repr()}"
        )
        return shown + self._split_repr()
