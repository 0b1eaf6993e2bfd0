"""te_mx.Linear: nn.Linear that runs in MXFP8 under te_mx.autocast."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from te_mx.nn.arguments import Options, refuse
from te_mx.nn.base import MXModule
from te_mx.nn.tensor_parallel import COLUMN, ROW
from te_mx.weights import missing, split


class Linear(split.SplitWeight, MXModule, nn.Linear):
    """``y = x @ weight.T + bias``, inside `te_mx.autocast` in the formats of its recipe (MXFP8 by
    default), and exactly nn.Linear outside.

    Parameters, their names, their default initialization and the state_dict are those of nn.Linear,
    so checkpoints go both ways; ``_extra_state`` of Transformer Engine is accepted and ignored.

    The input, the weight and the output gradient are quantized in blocks along the reduction
    dimension of the GEMM that they enter, and each is read once. What backward needs is saved as
    codes and scales, 1.03 bytes an element in MXFP8. The weight is quantized at every forward, so
    that a change is never missed; `is_first_microbatch` and `te_mx.freeze_weights` say when it
    stands still.

    Args:
        in_features, out_features: any sizes, 0 and 1 included; they need not divide by 32.
        bias: with a bias [out_features].
        device, dtype: of the parameters; dtype is fp32, bf16 or fp16.
        init_method: called as ``init_method(weight)`` after the default initialization.
        return_bias: return ``(x @ weight.T, bias)`` without adding the bias; bias is None for a
            layer without one.
        params_dtype: Transformer Engine's name for `dtype`.
        name: shown in errors and by `te_mx.audit`.
        fuse_wgrad_accumulation: the wgrad GEMM adds to ``weight.main_grad`` (made by the user; fp32
            as a rule) instead of making a ``weight.grad``. The first gradient that comes after a
            forward with is_first_microbatch=True overwrites, the first of every backward pass where
            the parameter has ``overwrite_main_grad = True``; those of other uses of the weight add,
            in whatever order they come. A parameter that has ``grad_added_to_main_grad`` gets it
            set to True and a stand-in ``.grad`` of no meaning. ``torch.autograd.grad`` of the
            weight adds to main_grad and returns zeros.
        delay_wgrad_compute: backward leaves the weight gradient for `backward_dw`, which the user
            calls once for each backward pass. The bias gradient is not delayed.
        save_original_input: save the input itself for backward and quantize it again there: less
            memory where something else keeps the input anyway, and the same bits.
        parameters_split: names, or a dict of names and sizes: weight and bias become the parameters
            ``<name>_weight`` and ``<name>_bias``, in this order along out_features; `weight` and
            `bias` are None then. All of one size unless a dict says otherwise.
        tp_group, tp_size, parallel_mode, sequence_parallel: the layer is shared by the ranks of a
            process group, as in Transformer Engine: docs/distributed.md. The group may come later,
            by `set_tensor_parallel_group`.
        transformer_engine: further arguments of Transformer Engine's Linear, at their defaults; see
            docs/compatibility.md.

    Main gradients, delaying, saving the input and splitting work outside autocast too.
    `fuse_wgrad_accumulation` and `delay_wgrad_compute` break the graph of torch.compile at the
    layer; under ``fullgraph=True`` they are an error. On several ranks (docs/distributed.md) the
    gradient is averaged or put together and goes to ``main_grad`` or ``grad`` of what the optimizer
    has: of the shard under fully_shard. FullyShardedDataParallel refuses both at the first forward
    that trains.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """

    # Class attributes, not set in __init__: convert_model turns an nn.Linear into this class.
    weight: Any = missing.Weight()
    return_bias: bool = False
    init_method: Callable[[Tensor], Any] | None = None
    parallel_mode: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        parameters_split: Iterable[str] | Mapping[str, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        **transformer_engine: Any,
    ) -> None:
        options = Options("Linear", locals(), "in_features", "out_features")
        out_features = options.part(COLUMN, "out_features", options.sizes[1])
        in_features = options.part(ROW, "in_features", options.sizes[0])
        self.__dict__["parallel_mode"] = parallel_mode
        # nn.Linear.__init__ calls reset_parameters, which reads them.
        self.__dict__["_building"] = True
        self.__dict__["init_method"] = None if parameters_split is not None else init_method
        super().__init__(in_features, out_features, bias, options.device, options.dtype)
        options.keep(self)
        if parameters_split is not None:
            self._split_into(parameters_split, out_features, options.ranks(COLUMN))
            if init_method is not None:
                self.reset_parameters()
            self._preserve_weights()
        if delay_wgrad_compute:
            self._start_delaying()
        self._share(parallel_mode, options.how, tp_group)
        del self._building

    def _initialize(self) -> None:
        """nn.Linear's default initialization, then `init_method` on the weight, or on each weight
        under `parameters_split`."""
        if self._reset_parts():
            return
        nn.Linear.reset_parameters(self)
        if self.init_method is not None:
            self.init_method(self.weight)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """inp [..., in_features] -> [..., out_features], and the bias under `return_bias`.

        Args:
            inp: fp32, bf16 or fp16 (any dtype of nn.Linear outside autocast); any strides.
            is_first_microbatch: None quantizes the weight now. True quantizes and keeps it, False
                uses what is kept: for the micro-batches of one optimizer step, between which the
                weight stands still. What is kept is replaced when the recipe or the device changed,
                or when it lacks the direction that backward needs. Compiled code and CUDA graphs
                quantize each time, with the same result. With `fuse_wgrad_accumulation`, True also
                has the next gradient of the weight overwrite main_grad.
            fp8_output, fp8_grad: must be False.

        The dtype of the result is torch.autocast's where that is on, else that of `inp`.

        Raises:
            ValueError: the last dimension of `inp` is not in_features, or a parameter has another
                shape than the layer's or lies on another device than `inp`.
            TypeError: the dtype of `inp` or of a parameter cannot be quantized.
            RuntimeError: backward recomputes it and cannot know the recipe, see te_mx.autocast.
            NotImplementedError: a data-parallel wrapper would lose the weight gradient; or
                forward-mode AD or a transform of torch.func follows `inp` or a parameter, in MXFP8
                (one level of grad, grad_and_value or vjp may).
        """
        if not (fp8_output is fp8_grad is False or isinstance(inp, Proxy)):
            refuse("Linear", "fp8_output", fp8_output)
            refuse("Linear", "fp8_grad", fp8_grad)
        settings, made = self._enter(inp, is_first_microbatch)
        if settings is None:
            return made
        weight, bias, added, facts = self._checked(inp)
        first, source = is_first_microbatch, self._source
        out = source.linear(self, inp, weight, added, settings, first, facts=facts)
        return (out, bias) if self.return_bias else out

    def _high_precision(self, inp: Tensor, is_first_microbatch: bool | None) -> Any:
        weight, bias = self._weight_and_bias()
        added = None if self.return_bias else bias
        out = self._plain_linear(inp, "weight", weight, added, is_first_microbatch)
        return (out, bias) if self.return_bias else out

    # ----------------------------------------------------------------------------- checks and names
    def _described(self) -> str:
        bias = self.whole_bias() is not None
        shown = f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"
        return shown + self._split_repr()
