"""te_mx.LayerNormMLP: a normalization and two linear layers with an activation between them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint

from te_mx.autograd import node
from te_mx.autograd.layer import Call, Parameters, Weights, run_layer
from te_mx.autograd.linear import Call as linear_call
from te_mx.autograd.linear import linear
from te_mx.autograd.node import needs_gradient
from te_mx.context.region import output_dtype
from te_mx.dispatch.fused import NORMS, Activation
from te_mx.nn import activations
from te_mx.nn.arguments import Options
from te_mx.nn.norm_base import NormModule
from te_mx.nn.tensor_parallel import BOTH
from te_mx.recipes.settings import Mixed
from te_mx.weights import gated_halves


class LayerNormMLP(gated_halves.GatedHalves, NormModule):
    """``y = act(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias``: inside
    `te_mx.autocast` in the formats of its recipe (MXFP8 by default), torch's own functions outside.

    With GELU the activation runs inside the GEMMs, forward and backward; other activations are
    quantized as they are computed (te_mx/autograd/layer.py says what is rounded and saved).

    Parameters: ``layer_norm_weight`` and ``layer_norm_bias`` [hidden_size] (the bias for LayerNorm
    only), ``fc1_weight`` [F1, hidden_size], ``fc1_bias`` [F1], ``fc2_weight`` [hidden_size,
    ffn_hidden_size], ``fc2_bias`` [hidden_size], with F1 twice ffn_hidden_size for gated
    activations: first the rows that are activated, then those of the gate. Names and initialization
    are Transformer Engine's (weights normal with standard deviation 0.023, biases 0);
    ``_extra_state`` of its checkpoints is accepted and ignored.

    Args:
        hidden_size, ffn_hidden_size: any sizes; they need not divide by 32.
        bias: with fc1_bias and fc2_bias.
        device, dtype: of the parameters; dtype is fp32, bf16 or fp16.
        eps, normalization, zero_centered_gamma: as for te_mx.LayerNormLinear. te_mx alone also
            takes normalization=None: the module starts with fc1 and has no layer_norm parameters.
        activation: gelu (the tanh form), relu, srelu, silu or qgelu, and te_mx alone also gelu_erf
            (nn.GELU's default); gated: geglu, reglu, sreglu, swiglu, qgeglu,
            glu or clamped_swiglu. te_mx/nn/activations.py has the formulas.
        activation_params: limit (7.0), alpha (1.702) and glu_linear_offset (1.0) of clamped_swiglu.
        return_layernorm_output: also return the normalized input, which has a gradient of its own.
        return_bias: return fc2_bias instead of adding it.
        init_method, output_layer_init_method: called with fc1_weight and fc2_weight instead of the
            default initialization.
        params_dtype: Transformer Engine's name for `dtype`.
        name: shown in errors and by `te_mx.audit`.
        fuse_wgrad_accumulation, delay_wgrad_compute: as for te_mx.Linear, for both weights; one
            `backward_dw` computes the gradients of both.
        seq_length, micro_batch_size: Transformer Engine's hints, of no effect.
        checkpoint: keep the input alone for backward and run the module again there
            (torch.utils.checkpoint): the same bits, for less memory and one forward more.
        tp_group, tp_size, set_parallel_mode, sequence_parallel: fc1 and fc2 are shared by the ranks
            of a process group, as in Transformer Engine: docs/distributed.md. The group may come
            later, by `set_tensor_parallel_group`.
        transformer_engine: Transformer Engine's further arguments, at their defaults.

    Raises:
        TypeError, ValueError: a wrong type or value, by name, or arguments that disagree.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """

    _norms = (*NORMS, None)
    _linear_names = "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"
    _weight_keys = "fc1_weight", "fc2_weight"
    _size_name = "hidden_size"
    _act: Activation
    checkpoint: bool = False
    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
        normalization: str | None = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        checkpoint: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        set_parallel_mode: bool = False,
        sequence_parallel: bool = False,
        **transformer_engine: Any,
    ) -> None:
        super().__init__()
        options = Options("LayerNormMLP", locals(), "hidden_size", "ffn_hidden_size")
        hidden_size, ffn_hidden_size = options.sizes
        ffn_hidden_size = options.part(BOTH, "ffn_hidden_size", ffn_hidden_size)
        self._start(options, hidden_size)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.activation = activation
        self._act = activations.resolve("te_mx.LayerNormMLP", activation, activation_params)
        if normalization is None and return_layernorm_output:
            raise ValueError(
                "te_mx.LayerNormMLP: return_layernorm_output=True needs a normalization, got "
                "normalization=None"
            )
        rows = 2 * ffn_hidden_size if self._act.gated else ffn_hidden_size
        self._make_parameters(options, (rows, hidden_size), (hidden_size, ffn_hidden_size))
        self._complete(options)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """inp [..., hidden_size] -> [..., hidden_size]; then fc2_bias under `return_bias`, then the
        normalized input under `return_layernorm_output`.

        Args:
            inp: fp32, bf16 or fp16; any strides.
            is_first_microbatch: as for te_mx.Linear, for both weights.

        The dtype of the result is torch.autocast's where that is on, else that of `inp`.

        Raises:
            ValueError: the last dimension of `inp` is not hidden_size, or a parameter has another
                shape than the module's or lies on another device than `inp`.
            TypeError: the dtype of `inp` or of a parameter cannot be quantized.
            RuntimeError: backward recomputes it and cannot know the recipe, see te_mx.autocast.
            NotImplementedError: forward-mode AD or a transform of torch.func follows `inp` or a
                parameter, in MXFP8; one level of grad, grad_and_value or vjp may.
        """
        saves = self.checkpoint and torch.is_grad_enabled() and not isinstance(inp, Proxy)
        # Of several ranks the layer of each does it.
        if saves and not (node.active() or self._is_spread(inp)):
            # It draws no random numbers, so there are none to draw again.
            return checkpoint(
                self._forward, inp, is_first_microbatch, use_reentrant=False,
                preserve_rng_state=False,
            )  # fmt: skip
        return self._forward(inp, is_first_microbatch)

    def _linears(self) -> tuple[list[Any], tuple[tuple[int, int], ...]]:
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        rows = 2 * ffn if self._act.gated else ffn
        return self._all_parameters(), ((rows, hidden), (hidden, ffn))

    def _in_two(self, inp: Tensor, first: bool | None, settings: Mixed) -> Any:
        """A forward where fc1 and fc2 run with different recipes: as a te_mx.LayerNormLinear, an
        activation, and a te_mx.Linear."""
        one, two = settings.each
        p, bias, _ = self._read(inp)
        source, queue, tags = self._source, self._queue_of_call(), self._tags()
        if one is None:
            z: Any = self._plain_norm(inp)
            h = self._plain_linear(z, "fc1_weight", p.w1, p.b1, first, queue)
        else:
            need = needs_gradient(inp, p.norm_weight, p.norm_bias)
            kept = source.operands(self, "fc1_weight", one, first, inp.device, need)
            grad_target = self._grad_target("fc1_weight", p.w1, first, queue)
            call = Call(self._step(inp), None, one, self.return_layernorm_output, (tags[0], -1))
            weights = Weights((kept, None), (grad_target, None))
            h, z = run_layer(inp, Parameters(*p[:4]), weights, call)
        a = activations.beside(h, self._act, two)
        if two is None:
            out = self._plain_linear(a, "fc2_weight", p.w2, p.b2, first, queue)
        else:
            kept = source.operands(self, "fc2_weight", two, first, a.device, needs_gradient(a))
            grad_target = self._grad_target("fc2_weight", p.w2, first, queue)
            call_two = linear_call(two, output_dtype(inp), tags[1], kept, False, grad_target)
            out = linear(a, p.w2, p.b2, call_two)
        return self._returned(out, bias, z)

    def _described(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"bias={self.use_bias}, activation={self.activation!r}, {self._norm_repr()}"
        )
