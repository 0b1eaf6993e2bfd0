"""The decode kernel of Hopper: a few rows, quantized on the way in, times weights that stand still,
one or those of groups of rows. A row has the same bits whatever rows are beside it, and however
many."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_mx import layouts
from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES, pointer, why_not_dtype
from te_mx.backends.base import FORMATS as FORMAT_IDS
from te_mx.backends.native import FORMATS, words_of
from te_mx.backends.sm90 import binding, gemm, grouped
from te_mx.backends.sm90.blockwise import FORMATS as BLOCKWISE
from te_mx.backends.sm90.blockwise import is_low
from te_mx.backends.sm90.envelope import why_not, why_not_second
from te_mx.backends.sm90.layouts import SM90_FACTORS, SM90_FROZEN
from te_mx.backends.sm90.layouts.frozen import FORMAT
from te_mx.backends.sm90.layouts.tiles import BLOCK, BY_ROWS, MAX_SPREAD, TILE, tile_element
from te_mx.dispatch.fused import ACT_IDS
from te_mx.dispatch.linear import FrozenCall, FrozenKernel
from te_mx.dispatch.problem import FROZEN_ROWS, GROUP_ROWS, INVARIANT, Problem
from te_mx.dispatch.registry import register
from te_mx.formats.scaling import split_rule
from te_mx.layouts import Layout, spec_of
from te_mx.layouts.operand import Operand, Stack
from te_mx.runtime import workspace

DECODE, ROWS_OF_MANY = "sm90_decode", "sm90_rows"
GATED = ("silu", "qgelu", "gelu")  # x times a sigmoid
# What scales of blocks with other codes than zeros may be: so that one times the sum of a block
# stays inside fp32, whatever the scale of the other side is.
LEAST, MOST, NAN = 24, 215, 255
LEAST_FACTOR, MOST_FACTOR = 2.0**-60, 2.0**60
# Layouts of the GEMM. Products of aligned MXFP8 are those of codes that were rounded.
PACKED = "sm90", SM90_FACTORS.name, SM90_FROZEN.name
ROW_BLOCKS, BLOCKS = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
FAR = 3  # the class of tiles with others
QUAD = 128  # of k that fp32 scales are for
# Rows of blockwise FP8 weights that lie in tiles, where the GEMM is faster on more: of precision
# "adaptive" in FP8 so many, twice as many where all blocks of 128 x 128 run at once; else less.
IN_TILES, ELSE_IN_TILES = 128, 32


class Decoded:
    """Products of one size, by a record that is made once."""

    __slots__ = ("index", "name", "native", "nbytes", "record", "sizes")

    def __init__(self, p: Problem) -> None:
        self.native, self.index, self.sizes = binding.native(), p.place.index, (p.m, p.n, p.k)
        self.name = ROWS_OF_MANY if p.precision == INVARIANT else DECODE
        x, w = (FORMAT_IDS[words_of(spec)[0]] for spec in (p.lhs, p.rhs))
        of_w = spec_of(p.rhs).format
        rule, epsilon = split_rule(p.rule)
        self.record = self.native.DecodeArgs(
            m=p.m, n=p.n, k=p.k, w_element=w, x_element=x, x_as_is=not p.lhs,
            factors=of_w.name in BLOCKWISE, factor_rows=of_w.scaling.block[0],
            rule=SCALE_RULES[rule], spread=_spread(p),
            amax_epsilon=epsilon, exact=p.precision == "exact", ldo=p.n, device=self.index,
        )  # fmt: skip
        self.nbytes = self.record.workspace_bytes = self.native.decode_workspace(p.m, p.k, p.groups)

    def __call__(self, call: FrozenCall) -> tuple[Tensor, str] | None:
        x, weight, bias, out_dtype, offs, act, gate = call
        m, n, k = self.sizes
        x_MK = x if x.dim() == 2 else x.reshape(m, k)
        if x_MK.stride(1) != 1:
            x_MK = x_MK.contiguous()
        y = torch.empty((*x.shape[:-1], n), dtype=out_dtype, device=x.device)
        args = self.record.copy(
            w=weight.codes.data_ptr(), ldw=weight.codes.stride(-2),
            w_scales=weight.scales.data_ptr(), w_packed=weight.layout is not layouts.ROWS,
            x=x_MK.data_ptr(), ldx=x_MK.stride(0),
            x_dtype=FLOAT_DTYPES[x.dtype], out=y.data_ptr(), out_dtype=FLOAT_DTYPES[out_dtype],
            stream=binding.stream(self.index),
        )  # fmt: skip
        if bias is not None:
            bias = bias.contiguous()
            args.bias, args.bias_dtype = bias.data_ptr(), FLOAT_DTYPES[bias.dtype]
        if offs is not None:
            offs = grouped.offs_on_device(offs, x.device)
            args.groups = grouped.groups_of(offs, 0, m)
        if act is not None:
            args.activates, args.act = True, ACT_IDS[act]
        if gate is not None:
            values = binding.rows_of(gate.values.reshape(m, k))
            args.gate, args.ldgate = values.data_ptr(), values.stride(0)
            args.x_act = ACT_IDS[gate.act]
        scratch = workspace.acquire(x.device, self.nbytes)
        args.workspace = pointer(scratch)
        done = binding.supported(self.native.decode(args))
        workspace.release(scratch, self.nbytes)
        return (y, self.name) if done else None


class Decode(FrozenKernel):
    """Weights of 8 bits as they lie for the GEMM, or plain; inputs quantized to FP8 with
    scales of the same kind, or of 16 bits as they are."""

    name, planner = DECODE, Decoded
    gates = GATED

    def accepts(self, problem: Problem) -> str | None:
        fmt, _, lies = problem.rhs.partition("@")
        in_tiles = lies != "any" and not problem.groups and fmt != "mxfp8_e4m3"
        problem = problem._replace(rhs=f"{fmt}@any")  # whichever of both it is given
        reason = why_not(problem, formats=(*FORMATS, *BLOCKWISE))
        if reason is None:
            reason = why_not_second(problem.rhs) or _why_not_formats(problem.lhs, problem.rhs)
        if reason is None and not problem.lhs and problem.dtype == torch.float32:
            reason = "takes inputs as they are in bfloat16 and float16"
        if reason is None and problem.m > (most := _most_rows(problem, in_tiles)):
            reason = f"takes at most {most} rows{' of weights in tiles' * in_tiles}"
        if reason is None and problem.precision == "exact" and not layouts.get(lies).exact:
            reason = f"multiplies what layout {lies} rounds, which precision 'exact' does not allow"
        return reason or why_not_dtype(problem)

    def sums(self, problem: Problem) -> str:
        if problem.m > ELSE_IN_TILES and problem.rhs.partition("@")[2] == SM90_FACTORS.name:
            return super().sums(problem)
        return self.name  # k is cut by the sizes of the weight alone

    def reads(self, layout: Layout) -> bool:
        return layout is layouts.ROWS or layout.name.partition(":")[0] in PACKED

    def form(self, row: Operand | Stack) -> Operand | Stack | None:
        """The same codes and scales, but for rows that start elsewhere than at whole 16 bytes."""
        each = map(row.group, range(row.groups)) if isinstance(row, Stack) else [row]
        if not all(map(_fits, each)):
            return None
        codes, scales = SM90_FROZEN.aligned(row.codes, row.scales)
        return row._replace(codes=codes, scales=scales)


# How weights lie that `Rows` reads, and the format of their inputs.
_AMONG_MANY = {FORMAT: (SM90_FROZEN, FORMAT), BLOCKS: (SM90_FACTORS, ROW_BLOCKS)}


class Rows(Decode):
    """Weights in tiles, of MXFP8 or in blocks of 128 x 128, with the sums that a row has among many
    (Invariant in gemm.py, blockwise.py): x of MXFP8 is aligned in each row's 128 of k, and k is one
    piece."""

    name, invariant = ROWS_OF_MANY, True

    def accepts(self, problem: Problem) -> str | None:
        fmt, layout = spec_of(problem.rhs)
        wanted = _AMONG_MANY.get(fmt.name)
        reason = None
        if problem.precision != INVARIANT:
            reason = f"is for precision 'invariant', this asks for {problem.precision!r}"
        elif wanted is None or layout is not wanted[0]:
            reason = "takes weights of MXFP8 and of blocks of 128 x 128 that lie in tiles"
        elif not problem.lhs or spec_of(problem.lhs).format.name != wanted[1]:
            reason = f"takes inputs in {wanted[1]} with {fmt.name}"
        return reason or super().accepts(problem)

    def reads(self, layout: Layout) -> bool:
        return layout is SM90_FROZEN or layout is SM90_FACTORS

    def form(self, row: Operand | Stack) -> Operand | Stack:
        """The same: the kernel is right for every scale."""
        codes, scales = SM90_FROZEN.aligned(row.codes, row.scales)
        return row._replace(codes=codes, scales=scales)


def _spread(problem: Problem) -> int:
    """Octaves that the blocks of a row of x may be apart for one scale: as those of a weight."""
    if problem.precision == INVARIANT:
        return BY_ROWS
    return int(problem.rhs.partition("sm90:")[2] or MAX_SPREAD)


def _fits(row: Operand) -> bool:
    """Whether the kernels multiply the numbers of a weight. Waits for its device."""
    plain, factors = row.layout is layouts.ROWS, row.format.name in BLOCKWISE
    scales = row.scales
    if factors:
        if not plain:
            _, scales = SM90_FACTORS.unpack(row.format, row.codes, scales, row.k)
        scales = scales.repeat_interleave(row.format.scaling.block[0], 0)[: row.rows]
        low, high = scales < LEAST_FACTOR, scales > MOST_FACTOR
    else:
        if not plain:
            scales, cls = _bytes_of(row)
            if bool((cls == FAR).any()):
                return False
        low, high = scales < LEAST, (scales > MOST) & (scales != NAN)
    if not bool((low | high).any()):
        return True
    codes, element = row.codes, row.format.element
    if plain:
        codes = row.format.unpack(codes, row.k)
    else:
        element = tile_element(row.format.name)
    width = QUAD if factors else BLOCK
    there = pad(codes & (element.sign - 1), (0, scales.shape[1] * width - row.k)) != 0
    return not bool((high | (low & there.unflatten(1, (-1, width)).any(2))).any())


def _bytes_of(row: Operand) -> tuple[Tensor, Tensor]:
    """Scale bytes [rows, 4 ceil(k/128)] of a packed operand, shared ones four times; classes."""
    words, cls = row.scales[..., :TILE], row.scales[..., TILE : TILE + 1]
    own = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    shared = (words >> 23).to(torch.uint8)[..., None].expand_as(own)
    made = torch.where(cls[..., None] < 2, shared, own)  # [steps, tiles, 128, 4]
    return made.permute(1, 2, 0, 3).reshape(-1, 4 * len(made))[: row.rows], cls


def _most_rows(p: Problem, in_tiles: bool) -> int:
    if not in_tiles:
        return max(FROZEN_ROWS, GROUP_ROWS * p.groups)
    if p.precision == INVARIANT:
        return FROZEN_ROWS
    tiles, at_once = -(-p.n // TILE), gemm.multiprocessors(p.place.index)
    if not p.lhs.startswith("fp8_e4m3") or p.precision != "adaptive":
        return ELSE_IN_TILES
    return 2 * IN_TILES if 2 * tiles <= at_once else IN_TILES


def _why_not_formats(lhs: str, rhs: str) -> str | None:
    """Why inputs and weights in these formats are not multiplied."""
    if not lhs:
        return None
    x, w = spec_of(lhs).format, spec_of(rhs).format
    if w.name in BLOCKWISE:
        if x.name not in BLOCKWISE or not is_low(x):
            return f"takes inputs in blocks of 1x128 with {w.name}, not {x.name}"
    elif x.name not in FORMATS:
        return f"takes inputs in {' and '.join(FORMATS)} with {w.name}, not {x.name}"
    return None


register(Decode())
register(Rows())
