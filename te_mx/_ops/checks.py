"""Checks of what ops are given, before any address is taken. They look at devices, dtypes and
shapes only, never at values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from te_mx.dispatch.calls import BIAS_GRADS, FLOAT_DTYPES, GELUS, Epilogue
from te_mx.dispatch.fused import ACTIVATIONS, NORMS, ActStep, NormStep
from te_mx.dispatch.groups import INDEX_DTYPES
from te_mx.formats.scaling import is_stochastic
from te_mx.layouts import names, spec_of
from te_mx.layouts.operand import Operand, Stack


def one_device(
    device: torch.device, names: Sequence[str], tensors: Sequence[Tensor | None]
) -> None:
    """Raise ValueError unless all tensors are on a device; they are called `names`."""
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            name = next(n for n, t in zip(names, tensors, strict=True) if t is tensor)
            raise ValueError(
                f"te_mx: {name} is on {tensor.device}, what it belongs to is on {device}; move one"
            )


def writable(out: Tensor) -> None:
    """Raise ValueError if values cannot be written where out lies. For calls that go through the
    dispatcher, which reads negative views and cannot write them."""
    if not torch.compiler.is_compiling() and out.is_neg():
        raise ValueError("te_mx: out is a negative view; pass out.resolve_neg()")


def float_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless a dtype is one that kernels read and write."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"te_mx: the dtype must be float32, bfloat16 or float16, got {dtype}")


# What was found right before, without a seed.
_quantizable: set[tuple[str, str, str, torch.dtype]] = set()


def quantizable(x: Tensor, row: str, col: str, rule: str, seed: Tensor | None = None) -> None:
    """Raise unless x is a matrix that can be quantized to these specs by this rule, with this seed
    where the rule rounds stochastically.

    Raises:
        ValueError: x is no matrix; a format or layout is unknown, or the format has not the rule;
            a seed is missing, not wanted or no int64 [1] on the device of x.
        TypeError: x is not fp32, bf16 or fp16.
    """
    if x.dim() != 2:
        raise ValueError(f"te_mx: x must be a matrix, got shape {tuple(x.shape)}; flatten it")
    key = row, col, rule, x.dtype
    if seed is None and key in _quantizable:
        return
    if (seed is not None) != is_stochastic(rule):
        raise ValueError(
            "te_mx: a seed belongs to rules that end in '+sr', got "
            f"{'no' if seed is None else 'a'} seed with rule {rule!r}"
        )
    device = x.device
    if seed is not None and (
        seed.dtype != torch.int64 or seed.shape != (1,) or seed.device != device
    ):
        raise ValueError(
            f"te_mx: the seed must be int64 [1] on {device}, got {seed.dtype} "
            f"{tuple(seed.shape)} on {seed.device}"
        )
    float_dtype(x.dtype)
    for spec in (row, col):
        if spec:
            fmt = spec_of(spec).format
            if not fmt.scaling.takes(rule):
                raise ValueError(
                    f"te_mx: the scale rule of {fmt.name} must be one of "
                    f"{fmt.scaling.shown_rules}, got {rule!r}"
                )
    if seed is None:
        _quantizable.add(key)


def tokens(name: str, spec: str, kind: str) -> None:
    """Raise ValueError unless tokens lie, as their spec says, so that their rows (kind "rows") or
    their k ("k") belong to groups."""
    fmt, layout = spec_of(spec)
    if fmt.scaling.block[0] != 1:
        raise ValueError(
            f"te_mx: {name} cannot have format {fmt.name}: its blocks hold several rows, which may "
            "belong to several groups; use a format with blocks of one row"
        )
    if layout.tokens != kind:
        known = ", ".join(names(kind))
        raise ValueError(
            f"te_mx: {name} must lie in groups of {kind}: layout {known}, got {layout.name}"
        )


def offsets(offs: Tensor, device: torch.device, groups: int | None = None) -> None:
    """Raise ValueError unless offs are end offsets on a device or on the CPU."""
    if offs.dim() != 1 or offs.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"te_mx: offs must be a vector of end offsets in int32 or int64, got {offs.dtype} "
            f"{tuple(offs.shape)}"
        )
    if groups is not None and offs.shape[0] != groups:
        raise ValueError(
            f"te_mx: offs must have an entry for each of {groups} groups, got {len(offs)}"
        )
    if not (offs.is_cpu or offs.device == device):
        one_device(device, ("offs",), (offs,))


def quantized_groups(x: Tensor, offs: Tensor, row: str, col: str) -> None:
    """Raise ValueError unless tokens x can be quantized by groups to these specs."""
    for name, spec, kind in (("row", row, "rows"), ("col", col, "k")):
        if spec:
            tokens(name, spec, kind)
    offsets(offs, x.device)


def alike(weights: Sequence[Tensor]) -> None:
    """Raise unless all weights are fp32, bf16 or fp16, have one shape and lie on one device."""
    shape, device = weights[0].shape, weights[0].device
    for i, weight in enumerate(weights):
        if weight.shape != shape or weight.device != device:
            raise ValueError(
                f"te_mx: weights of groups must be alike, got {tuple(shape)} on {device} for group "
                f"0 and {tuple(weight.shape)} on {weight.device} for group {i}"
            )
        float_dtype(weight.dtype)


# -------------------------------------------------------------------------------------------- GEMMs
_alike_specs: set[tuple[str, str]] = set()  # what was found to be transformed alike


def transformed_alike(lhs: str, rhs: str) -> None:
    """Raise ValueError unless two specs have the same transform along k, or none."""
    if lhs == rhs or (lhs, rhs) in _alike_specs:
        return
    one, other = spec_of(lhs).format, spec_of(rhs).format
    if one.transform != other.transform:
        raise ValueError(
            f"te_mx: both sides of a product need the same Hadamard transform along k, got "
            f"{one} and {other}; quantize both with it, or none"
        )
    _alike_specs.add((lhs, rhs))


_BESIDE = ("rhs", "the packed form of lhs", "the packed form of rhs", "bias", "gelu_in", "out")
_GELUS, _BIAS_GRADS = (None, *GELUS), (None, *BIAS_GRADS)


def product(lhs: Operand, rhs: Operand, epilogue: Epilogue, out: Tensor | None) -> None:
    """Raise ValueError unless operands, epilogue and out belong together."""
    bias, gelu, gelu_in, bias_grad, _ = epilogue
    m, n, device = lhs.rows, rhs.rows, lhs.codes.device
    if (
        rhs.codes.device != device
        or (out is not None and out.device != device)
        or (bias is not None and bias.device != device)
        or (gelu_in is not None and gelu_in.device != device)
        or (lhs.packed is not None and lhs.packed.device != device)
        or (rhs.packed is not None and rhs.packed.device != device)
    ):
        one_device(device, _BESIDE, (rhs.codes, lhs.packed, rhs.packed, bias, gelu_in, out))
    if lhs.k != rhs.k:
        raise ValueError(f"te_mx: lhs and rhs must have the same k, got {lhs.k} and {rhs.k}")
    transformed_alike(lhs.spec, rhs.spec)
    if gelu not in _GELUS or bias_grad not in _BIAS_GRADS:
        raise ValueError(
            f"te_mx: gelu must be one of {_GELUS} and bias_grad one of {_BIAS_GRADS}, got {gelu!r} "
            f"and {bias_grad!r}"
        )
    if out is not None and (out.shape != (m, n) or not out.is_contiguous()):
        raise ValueError(f"te_mx: out must be contiguous [{m}, {n}], got {tuple(out.shape)}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"te_mx: bias must be [{n}], got {tuple(bias.shape)}")
    if gelu_in is not None and gelu_in.shape != (m, n):
        raise ValueError(f"te_mx: gelu_in must be [{m}, {n}], got {tuple(gelu_in.shape)}")


_BESIDE_LHS = ("the scales of lhs", "rhs", "the scales of rhs", "the packed form of rhs", "bias")


def grouped_sides(
    lhs: Operand, rhs: Operand | Stack, offs: Tensor, groups: int | None, bias: Tensor | None = None
) -> None:
    """Raise ValueError unless the operands of a grouped product are on one device, with the same k
    and as many end offsets as groups."""
    device = lhs.codes.device
    beside = lhs.scales, rhs.codes, rhs.scales, rhs.packed, bias
    one_device(device, _BESIDE_LHS, beside)
    offsets(offs, device, groups)
    if lhs.k != rhs.k:
        raise ValueError(f"te_mx: lhs and rhs must have the same k, got {lhs.k} and {rhs.k}")
    transformed_alike(lhs.spec, rhs.spec)


def grouped_out(out: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError unless out is a contiguous tensor of a shape on a device."""
    if tuple(out.shape) != shape or not out.is_contiguous() or out.device != device:
        raise ValueError(
            f"te_mx: out must be contiguous {shape} on {device}, got {tuple(out.shape)} with "
            f"strides {out.stride()} on {out.device}"
        )


# ------------------------------------------------------------------------------------- fused steps
def vector(name: str, given: Tensor, size: int, device: torch.device) -> None:
    """Raise ValueError unless a tensor is fp32 [size] on a device."""
    if given.dtype != torch.float32 or given.shape != (size,) or given.device != device:
        raise ValueError(
            f"te_mx: {name} must be float32 [{size}] on {device}, got {given.dtype} "
            f"{tuple(given.shape)} on {given.device}"
        )


def norm_step(step: NormStep) -> None:
    """Raise unless x [rows, cols] can be normalized with weight and bias [cols]."""
    x, weight, bias, norm, dtype, _, target = step
    if dtype not in FLOAT_DTYPES:
        float_dtype(dtype)
    quantizable(x, target.row, target.col, target.rule, target.seed)
    if norm.kind not in NORMS:
        raise ValueError(f"te_mx: the normalization must be one of {NORMS}, got {norm.kind!r}")
    cols, device = x.shape[1], x.device
    vector("the weight of the normalization", weight, cols, device)
    if bias is not None:
        vector("the bias of the normalization", bias, cols, device)


def norm_gradient(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> None:
    """Raise unless dz and x [rows, cols], weight [cols], mean and rstd [rows] belong together."""
    for one in (dtype, x.dtype, dz.dtype):
        if one not in FLOAT_DTYPES:
            float_dtype(one)
    if x.dim() != 2 or dz.shape != x.shape or dz.device != x.device:
        raise ValueError(
            f"te_mx: dz must be a matrix as x, {tuple(x.shape)} on {x.device}, got "
            f"{tuple(dz.shape)} on {dz.device}"
        )
    (rows, cols), device = x.shape, x.device
    vector("the weight of the normalization", weight, cols, device)
    vector("rstd", rstd, rows, device)
    if mean is not None:
        vector("mean", mean, rows, device)


def act_step(step: ActStep) -> None:
    """Raise unless h [rows, cols], or [rows, 2 cols] for a gated activation, can be activated, and
    grad is [rows, cols] if there is one."""
    h, grad, act, dtype, _, target = step
    float_dtype(dtype)
    quantizable(h, target.row, target.col, target.rule, target.seed)
    if act.name not in ACTIVATIONS:
        raise ValueError(f"te_mx: the activation must be one of {ACTIVATIONS}, got {act.name!r}")
    rows, cols = h.shape
    if act.gated:
        if cols % 2:
            raise ValueError(f"te_mx: {act.name} halves the columns of h, got {tuple(h.shape)}")
        cols //= 2
    if grad is None:
        return
    float_dtype(grad.dtype)
    if grad.shape != (rows, cols) or grad.device != h.device:
        raise ValueError(
            f"te_mx: grad must be [{rows}, {cols}] on {h.device} for h {tuple(h.shape)}, got "
            f"{tuple(grad.shape)} on {grad.device}"
        )
