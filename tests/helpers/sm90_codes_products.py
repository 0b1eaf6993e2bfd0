"""Products of the Hopper kernel that unpacks codes of 4 bits in its main loop, beside those of the
kernel that finds them packed: cases for a GPU (tests/gpu) and for an emulated one."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx import _ops as ops
from te_mx import formats
from te_mx._ops import Epilogue, Mode, Operand
from te_mx.backends.sm90 import codes
from te_mx.backends.sm90.gemm import Adaptive
from te_mx.dispatch.calls import Product
from te_mx.dispatch.problem import Problem, place_of

FP4, E4M3, E5M2 = "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"
# Scale bytes from .. below ..: one exponent a tile, one a row, four a row, far exponents, NaN.
SPANS = {
    "shared": (118, 126),
    "rows": (100, 140),
    "spread": (0, 255),
    "far": (180, 200),
    "small": (0, 14),
    "nan": (120, 126),
}
EPILOGUES = ("plain", "bias", "accumulate", "gelu", "erf", "dgelu", "result")


def operand(rows: int, k: int, fmt: str, kind: str, device: str, seed: int = 0) -> Operand:
    """Plain codes of any bytes with scales of a kind; some blocks are zero."""
    g = torch.Generator().manual_seed(seed + rows + k)
    made = formats.get(fmt)
    blocks = -(-k // 32)
    fp4 = fmt == FP4
    one_a_byte = torch.randint(0, 16 if fp4 else 256, (rows, k), generator=g).to(torch.uint8)
    if not fp4:  # finite
        one_a_byte[one_a_byte & 0x7F >= 0x7B] = 0x30
    one_a_byte[torch.rand(rows, k, generator=g) < 0.3] = 0
    zero = torch.rand(rows, blocks, generator=g) < 0.1
    one_a_byte[zero.repeat_interleave(32, 1)[:, :k]] = 0
    low, high = SPANS[kind]
    if kind == "rows":  # one exponent a row, some octaves around it
        base = torch.randint(low, high, (rows, 1), generator=g)
        scales = base + torch.randint(0, 7, (rows, blocks), generator=g)
    else:
        scales = torch.randint(low, high, (rows, blocks), generator=g)
    scales = scales.to(torch.uint8)
    if kind == "nan":
        scales[rows // 2, blocks // 2] = 255
    held = made.pack(one_a_byte) if fp4 else one_a_byte
    return Operand(held.to(device), scales.to(device), f"{fmt}@rows", rows, k)


def in_tiles(plain: Operand) -> Operand:
    return ops.convert_2d(plain, f"{plain.format.name}@sm90:8")


def epilogue_of(name: str, m: int, n: int, device: str, dtype: torch.dtype) -> Epilogue:
    g = torch.Generator().manual_seed(m + n)
    bias = torch.randn(n, generator=g).to(device)
    before = torch.randn(m, n, generator=g).to(device, dtype)
    return {
        "plain": Epilogue(),
        "bias": Epilogue(bias),
        "accumulate": Epilogue(bias, accumulate=True),
        "gelu": Epilogue(bias, "tanh"),
        "erf": Epilogue(gelu="erf", accumulate=True),
        "dgelu": Epilogue(gelu="tanh", gelu_in=before, bias_grad="result"),
        "result": Epilogue(bias_grad="result"),
    }[name]


def run(kernel, lhs: Operand, rhs: Operand, epilogue: Epilogue, dtype, split_k: bool):
    """(name of what ran, D, aux, bias gradient); D and aux were NaN unless D is added to."""
    shape, device = (lhs.rows, rhs.rows), lhs.codes.device
    out = torch.full(shape, 0.5 if epilogue.accumulate else torch.nan, dtype=dtype, device=device)
    has_aux = epilogue.gelu is not None and epilogue.gelu_in is None
    aux = torch.full(shape, torch.nan, dtype=dtype, device=device) if has_aux else None
    problem = Problem(
        "gemm", place_of(device), lhs.spec, rhs.spec, *shape, lhs.k, dtype=dtype, split_k=split_k
    )
    made = kernel.make_plan(problem)(Product(lhs, rhs, epilogue, out, aux, Mode(split_k=split_k)))
    assert made is not None
    return made.name, out, aux, made.bias_grad


def same_bits(got: Tensor | None, want: Tensor | None) -> bool:
    if got is None or want is None:
        return got is want
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def check(
    lhs: Operand, rhs: Operand, name: str, parts: int, dtype: torch.dtype, monkeypatch
) -> None:
    """D, aux and bias gradient in the main loop and packed before, with as many parts of k."""
    device = lhs.codes.device
    epilogue = epilogue_of(name, lhs.rows, rhs.rows, str(device), dtype)
    monkeypatch.setattr(codes, "best_parts", lambda *sizes: parts)
    monkeypatch.setattr(codes, "faster_before", lambda *sizes: False)
    got = run(codes.Codes(), lhs, rhs, epilogue, dtype, True)
    assert got[0] == codes.CODES
    packed = [x if x.layout.name.startswith("sm90") else in_tiles(x) for x in (lhs, rhs)]
    before = Adaptive().configured(f"parts {parts}") if parts > 1 else Adaptive()
    want = run(before, *packed, epilogue, dtype, parts > 1)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert same_bits(mine, theirs)
