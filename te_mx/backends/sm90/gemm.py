"""The GEMM kernels of Hopper: on FP8 tensor cores with aligned scales, and on the exact values in
bf16."""

from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from te_mx.backends.base import BIAS_GRADS, FLOAT_DTYPES, LAYOUTS, pointer, set_epilogue
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.native import FP4, fields_of, record_of
from te_mx.backends.reference import gemm
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.envelope import as_multiplied, not_adaptive, why_not, why_not_second
from te_mx.backends.sm90.layouts import SM90_FROZEN, SM90_NVFP4, frozen
from te_mx.backends.sm90.layouts.tiles import BY_ROWS, FP4_SPREAD, packed_values
from te_mx.backends.sm90.quantize import Dequantizer
from te_mx.dispatch import run
from te_mx.dispatch.calls import Epilogue, Product, Ran
from te_mx.dispatch.kernels import Kernel, Plan, PreferredLayouts
from te_mx.dispatch.problem import INVARIANT, Problem, place_of
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Stack
from te_mx.runtime import workspace


# ----------------------------------------------------------------------------------------- split k
# Into how many parts kernels cut K, by sizes and the GPU alone: csrc/sm90/common/split.cpp.
# docs/numerics.md says what cutting does to bits.
@lru_cache(maxsize=4096)
def num_splits(kind: str, m: int, n: int, k: int, sms: int) -> int:
    """The parts of K of a product of this kind (SplitKind of te_mx/sm90_split.h): "tiles", or of
    4-bit weights "codes" in the main loop, "codes_before" it. 1 without native code."""
    native = cpu.native()
    return 1 if native is None else native.sm90_num_splits(kind, m, n, k, sms)


def parts(index: int, m: int, n: int, k: int) -> int:
    """The parts of K of the adaptive GEMM on a CUDA device; 1: K in one piece."""
    return num_splits("tiles", m, n, k, multiprocessors(index))


@lru_cache(maxsize=4096)
def split_us(kind: str, m: int, n: int, k: int, sms: int, parts: int) -> float:
    """Microseconds of "tiles" or "codes" with k in `parts`, by the model; 0 without native code."""
    native = cpu.native()
    return 0.0 if native is None else native.sm90_split_us(kind, m, n, k, sms, parts)


@lru_cache(maxsize=64)
def multiprocessors(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


# -------------------------------------------------------------------------------------------- ways
# The ways of the adaptive GEMM of Hopper that a table may choose between: the blocks of D that it
# computes ("tile 64x128"), or the parts that it cuts K into ("parts 4"). Without a table both
# follow cost models (csrc/sm90/gemm/gemm_choice.cpp).
class TileConfig(NamedTuple):
    """tile: a configuration of the native GEMM, -1 where it chooses. full: it has GELU, aux and
    bias gradients too. parts: of K, 0 where the cost model chooses."""

    tile: int = -1
    full: bool = True
    parts: int = 0


@lru_cache(maxsize=1)
def _tiles() -> dict[str, TileConfig]:
    native = cpu.native()
    if native is None:
        return {}
    found = native.sm90_gemm_tiles()
    names = (tile["name"].partition(",")[0] for tile in found)
    return {
        f"tile {name}": TileConfig(i, bool(tile["full"]), 1)
        for i, (name, tile) in enumerate(zip(names, found, strict=True))
    }


def configurations(k: int, split_k: bool) -> tuple[str, ...]:
    """All of them for products over k, those in parts where K may be cut."""
    native = cpu.native()
    if native is None:
        return ()
    most = min(native.SM90_MOST_PARTS, -(-k // native.SM90_STEP_K)) if split_k else 1
    return (*_tiles(), *(f"parts {parts}" for parts in range(2, most + 1)))


@lru_cache(maxsize=64)
def tile_config(configuration: str) -> TileConfig:
    """What a configuration says; "" leaves everything to the cost models."""
    if not configuration:
        return TileConfig()
    word, _, number = configuration.partition(" ")
    return TileConfig(parts=int(number)) if word == "parts" else _tiles()[configuration]


ADAPTIVE, EXACT = "sm90_adaptive", "sm90_exact"
_TILES, _F32 = LAYOUTS["sm90"], torch.float32
Weight = TypeVar("Weight", Operand, Stack)
_LARGE = 1 << 23  # elements of a result that fills the GPU without splitting k


def operand_sums(operand: Operand) -> Tensor:
    """fp32 [rows]: the sum over k of an operand's values, in an order that only sizes decide."""
    rows, k, fmt, layout = operand.rows, operand.k, operand.format, operand.layout
    if fmt.scaling.scale == "fp32":
        return operand.values(torch.float64).sum(1).to(_F32)
    if layout.name not in binding.PLAIN_LAYOUTS:
        return packed_values(operand, k, fmt.untransformed.name).sum(1).to(_F32)
    device = operand.codes.device
    if fmt.untransformed.name in FP4:
        p = Problem("dequantize", place_of(device), operand.spec, "", rows, k, dtype=_F32)
        values = Dequantizer(p).as_codes_lie(operand)
        assert values is not None
        return values.sum(0 if layout.k_first else 1)
    native = binding.native()
    sums = torch.empty(rows, dtype=_F32, device=device)
    nbytes = native.row_sums_workspace_bytes(rows, k, layout.k_first)
    args = native.RowSumsArgs(operand=record_of(native, operand), out=sums.data_ptr())
    scratch = workspace.acquire(device, nbytes)
    args.workspace, args.workspace_bytes = pointer(scratch), nbytes
    binding.set_execution(args, device.index)
    status = native.row_sums(args)
    workspace.release(scratch, nbytes)
    if not binding.supported(status):
        raise RuntimeError("te_mx internal error: the Hopper kernels do not sum this operand")
    return sums


class _Pack(NamedTuple):
    """A side that is packed first: the record of that, and where in the workspace to."""

    side: str
    record: Any
    codes_at: int
    scales_at: int


class Products:
    """Products of operands of one size, whose records are made once. Operands that are not packed
    yet are packed in the workspace, those of MXFP4 that lie by rows in one launch; their exponents
    may be others than those that a conversion gives, the product is not.

    parts: of K. tile: the configuration, -1 where native code chooses; full: whether it has GELU,
    aux and bias gradients too. as_is: the kernel reads 4-bit codes where they lie. spreads: how
    both sides are aligned, where the problem does not say it."""

    __slots__ = (
        "fp4", "full", "gemm", "index", "name", "native", "nbytes", "own_at", "packs", "record",
        "tile", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self, name: str, p: Problem, parts: int, tile: int = -1, full: bool = True,
        as_is: bool = False, spreads: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        native = binding.native()
        spreads = spreads or (p.spread, p.spread)
        self.name, self.native, self.index = name, native, p.place.index
        self.tile, self.full = tile, full
        self.gemm = native.gemm_codes if as_is else native.gemm
        self.workspace_bytes = native.codes_workspace_bytes if as_is else native.workspace_bytes
        self.record = native.GemmArgs(
            lhs_rows=p.m, lhs_k=p.k, rhs_rows=p.n, rhs_k=p.k, ldo=p.n,
            out_dtype=FLOAT_DTYPES[p.dtype], parts=parts, kernel=tile, device=self.index,
            **fields_of(p.lhs, "lhs"), **fields_of(p.rhs, "rhs"),
        )  # fmt: skip
        at, packs = 0, []
        sides = ("lhs", p.lhs, p.m), ("rhs", p.rhs, p.n)
        for (side, spec, rows), spread in zip(sides, spreads, strict=True):
            layout = spec_of(spec).layout
            fp4 = is_plain_fp4(spec) or layout is SM90_NVFP4
            plain = layout.name in binding.PLAIN_LAYOUTS or layout is SM90_NVFP4
            if plain and not (as_is and fp4):
                nbytes, scales_at = native.packed_bytes(rows, p.k)
                record = native.PackArgs(
                    rows=rows, k=p.k, out_layout=_TILES, spread=spread, device=self.index,
                    **fields_of(spec),
                )  # fmt: skip
                packs.append((not fp4, _Pack(side, record, at, at + scales_at)))
                setattr(self.record, f"{side}_layout", _TILES)
                at += nbytes
        packs.sort(key=lambda one: one[0])
        self.fp4 = sum(not rest for rest, _ in packs)
        self.packs, self.own_at = tuple(pack for _, pack in packs), at
        if name == ADAPTIVE and spec_of(p.rhs).layout is SM90_FROZEN:
            self.record.rhs_layout = LAYOUTS["standing"]
        self.nbytes = self.record.workspace_bytes = self.workspace_bytes(self.record)

    def __call__(self, p: Product) -> Ran | None:
        lhs, rhs, epilogue, out, aux, _ = p
        bias, gelu, gelu_in, kind, accumulate = epilogue
        stream, bias_grad, own = binding.stream(self.index), None, self.nbytes
        args = self.record.copy(
            lhs_codes=lhs.codes.data_ptr(), lhs_scales=lhs.scales.data_ptr(),
            rhs_codes=rhs.codes.data_ptr(), rhs_scales=rhs.scales.data_ptr(), out=out.data_ptr(),
            stream=stream, accumulate=accumulate,
        )  # fmt: skip
        if not (bias is None and gelu is None and gelu_in is None and kind is None):
            bias_grad, _alive = self._finish(args, epilogue, out, aux)
            own = args.workspace_bytes = self.workspace_bytes(args)
        nbytes, scratch = self.own_at + own, None
        if nbytes:
            scratch = workspace.acquire(out.device, nbytes)
            base: int = pointer(scratch)
            if self.packs:
                self._pack(args, {"lhs": lhs, "rhs": rhs}, base, stream)
            args.workspace = base + self.own_at
        done = binding.supported(self.gemm(args))
        if nbytes:
            workspace.release(scratch, nbytes)
        if not done:
            return None
        return Ran(self.name, operand_sums(lhs) if kind == "operand" else bias_grad)

    def _finish(
        self, args: Any, epilogue: Epilogue, out: Tensor, aux: Tensor | None
    ) -> tuple[Tensor | None, object]:
        """Write an epilogue into the record of a call: the bias gradient of the result that it
        fills, and what must live until it is enqueued."""
        _, gelu, gelu_in, kind, _ = epilogue
        if not self.full and not (gelu is None and gelu_in is None and kind is None):
            args.kernel = -1
        alive = set_epilogue(args, epilogue, aux, 16)  # so many bytes are read at once
        bias_grad = None
        if kind == "result":
            bias_grad = torch.empty(out.shape[1], dtype=_F32, device=out.device)
            args.bias_grad_kind, args.bias_grad = BIAS_GRADS["result"], bias_grad.data_ptr()
        return bias_grad, alive

    def _pack(self, args: Any, sides: dict[str, Operand], base: int, stream: int) -> None:
        """Pack what is plain, and let the record of a call read that."""
        native, due = self.native, []
        for side, record, codes_at, scales_at in self.packs:
            operand, codes, scales = sides[side], base + codes_at, base + scales_at
            due.append(record.copy(
                codes=operand.codes.data_ptr(), scales=operand.scales.data_ptr(),
                out_codes=codes, out_scales=scales, stream=stream,
            ))  # fmt: skip
            setattr(args, f"{side}_codes", codes)
            setattr(args, f"{side}_scales", scales)
        if self.fp4:
            unpack = native.unpack if self.fp4 == 1 else native.unpack_two
            if binding.supported(unpack(*due[: self.fp4])):
                due = due[self.fp4 :]
        if not all(binding.supported(native.pack(one)) for one in due):
            raise RuntimeError(
                "te_mx internal error: the Hopper kernels do not pack these operands"
            )


def is_plain_fp4(spec: str) -> bool:
    """Whether an operand lies in codes of 4 bits, two a byte along k."""
    fmt, layout = spec_of(spec)
    return fmt.untransformed.name in FP4 and layout.name == "rows"


class Adaptive(Kernel):
    """FP8 tensor cores; scales of tiles of 128 x 128 are aligned."""

    op, name, rank = "gemm", ADAPTIVE, 0

    def accepts(self, problem: Problem) -> str | None:
        layouts = "rows", "cols", "sm90", SM90_NVFP4.name
        reason = why_not(as_multiplied(problem), *layouts)
        return reason or not_adaptive(problem) or why_not_second(problem.rhs)

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        layout = f"sm90:{problem.spread}"
        return PreferredLayouts(layout, layout)

    def note(self, problem: Problem) -> str:
        sides = [spec_of(spec).format.untransformed.name for spec in (problem.lhs, problem.rhs)]
        fp4 = [name in FP4 for name in sides]
        said = []
        if not all(fp4):
            said.append(
                "scales of tiles of 128 x 128 are aligned where they differ by at most "
                f"2^{problem.spread}"
            )
        if any(fp4):
            said.append(
                "4-bit codes are unpacked to FP8 tiles before the main loop, where scales up to "
                f"2^{FP4_SPREAD} apart are aligned exactly"
            )
        return "; ".join((*said, "docs/numerics.md has the error"))

    def configurations(self, problem: Problem) -> tuple[str, ...]:
        return configurations(problem.k, problem.split_k)

    def parts(self, problem: Problem) -> int:
        return self._parts(problem.place.index, problem.m, problem.n, problem.k)

    def _parts(self, index: int, m: int, n: int, k: int) -> int:
        return tile_config(self.configuration).parts or parts(index, m, n, k)

    def sums(self, problem: Problem) -> str:
        # Not of the blocks of D. Of m: rows of a tile share exponents.
        parts = self.parts(problem) if problem.split_k else 1
        return f"aligned tiles, k in {parts}, {problem.m} rows"

    def prepares(self, m: int, n: int, k: int) -> bool:
        return True

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        if not operand.layout.exact:
            return operand
        return run.convert(operand, f"{operand.format.name}@{self.preferred_layouts(problem).row}")

    def make_plan(self, problem: Problem) -> Plan:
        config = tile_config(self.configuration)
        parts = self.parts(problem) if problem.split_k else 1
        return Products(ADAPTIVE, problem, parts, config.tile, config.full)


class Invariant(Adaptive):
    """FP8 tensor cores, where a row of D depends on its row of lhs and on rhs alone: scales of x
    are aligned in each row's 128 of k, those of weights as where they stand still without masters
    (layouts/frozen.py), and k is one piece. Sums of 128 products (32 where a tile of the weight is
    spread) times powers of two are added up in fp32 from left to right, whatever the blocks of D
    are."""

    name, invariant = "sm90_invariant", True

    def accepts(self, problem: Problem) -> str | None:
        lhs, rhs = spec_of(problem.lhs), spec_of(problem.rhs).layout
        reason = why_not(as_multiplied(problem), "rows", "cols", "sm90", SM90_NVFP4.name)
        tiles = getattr(lhs.layout, "spread", -1) == BY_ROWS
        if reason is None and not (tiles or lhs.layout.exact):
            reason = f"takes inputs in rows, or in sm90:{BY_ROWS}"
        if reason is None and not (rhs.exact or rhs is SM90_FROZEN):
            reason = f"takes weights in rows, or in {SM90_FROZEN.name}"
        if reason is None and problem.precision != INVARIANT:
            reason = f"is for precision 'invariant', this asks for {problem.precision!r}"
        if reason is None and lhs.format.element.name == "e5m2":
            reason = "aligns the rows of x in E4M3 and MXFP4, not in E5M2"
        return reason or why_not_second(problem.rhs)

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        plain = spec_of(problem.lhs).format.name != frozen.FORMAT
        return (
            PreferredLayouts() if plain else PreferredLayouts(f"sm90:{BY_ROWS}", right_row="rows")
        )

    def note(self, problem: Problem) -> str:
        return "scales of x are aligned in each row's 128 of k; docs/invariance.md has the error"

    def configurations(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def parts(self, problem: Problem) -> int:
        return 1

    def sums(self, problem: Problem) -> str:
        return self.name

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        return self._in_tiles(operand) if side == "rhs" else operand

    @staticmethod
    def _in_tiles(weight: Operand) -> Operand:
        """A weight as one that stands still without a master lies, where it would lie in tiles.
        Waits for nothing: what lies aside, products do not read."""
        made = weight
        if weight.layout.name == "cols" and weight.format.name == frozen.FORMAT:
            codes, scales = weight.codes.t().contiguous(), weight.scales.t().contiguous()
            made = weight._replace(
                codes=codes, scales=scales, spec=f"{weight.format.name}@rows", packed=None
            )
        return frozen_tiles(made) if lies_in_tiles(made.spec, made.k) else made

    def make_plan(self, problem: Problem) -> Plan:
        p, spreads = problem, (BY_ROWS, problem.spread)
        fmt, layout = spec_of(p.rhs)
        if not (layout.exact and lies_in_tiles(f"{fmt.name}@rows", p.k)):
            return Products(self.name, p, 1, spreads=spreads)
        tiles = p._replace(rhs=f"{fmt.name}@{SM90_FROZEN.name}")
        products = Products(self.name, tiles, 1, spreads=spreads)
        return lambda q: products(q._replace(rhs=self._in_tiles(q.rhs)))


def lies_in_tiles(spec: str, k: int) -> bool:
    """As backends/sm90/rest.py."""
    return spec == f"{frozen.FORMAT}@rows" and k % 16 == 0


def frozen_tiles(row: Weight) -> Weight:
    """A plain weight, or those of groups, in the tiles of layouts/frozen.py, without what lies
    aside."""
    native, index = binding.native(), row.codes.device.index
    with torch.inference_mode(False):  # it may outlive the mode
        made = binding.empty_like(row, f"{frozen.FORMAT}@{SM90_FROZEN.name}")
    parts = row.codes.contiguous(), row.scales.contiguous(), made.codes, made.scales
    for each in zip(*parts, strict=True) if isinstance(row, Stack) else [parts]:
        places = [part.data_ptr() for part in each]
        status = native.pack_frozen(
            places, *each[0].shape, 0, 0, 0, index or 0, binding.stream(index)
        )
        if not binding.supported(status):
            raise RuntimeError("te_mx internal error: the Hopper kernels do not pack this weight")
    return made


class ExactProducts:
    """Products of one size: both operands are upcast in a workspace, in a pass that is bound by
    memory, and multiplied by cuBLAS without transposing."""

    def __init__(self, p: Problem) -> None:
        asked = p._replace(op="dequantize", dtype=torch.bfloat16)
        self.lhs = Dequantizer(asked._replace(lhs=p.lhs, n=p.k))
        self.rhs = Dequantizer(asked._replace(lhs=p.rhs, m=p.n, n=p.k))
        self.rhs_at, rest = (2 * ((rows * p.k + 127) // 128 * 128) for rows in (p.m, p.n))
        self.nbytes = self.rhs_at + rest

    def __call__(self, p: Product) -> Ran:
        scratch = workspace.acquire(p.out.device, self.nbytes)
        assert scratch is not None
        left = self._values(self.lhs, p.lhs, scratch)
        right = self._values(self.rhs, p.rhs, scratch[self.rhs_at :]).t()
        made = Ran(EXACT, self._times(left, right, p))
        workspace.release(scratch, self.nbytes)
        return made

    @staticmethod
    def _values(by: Dequantizer, operand: Operand, scratch: Tensor) -> Tensor:
        """An operand in bf16 [rows, k]."""
        room = scratch[: 2 * operand.rows * operand.k].view(torch.bfloat16).view(by.shape)
        if by.as_codes_lie(operand, room) is None:
            raise RuntimeError(
                "te_mx internal error: the Hopper kernels do not upcast this operand"
            )
        return room.t() if by.k_first else room

    @staticmethod
    def _times(left: Tensor, right: Tensor, p: Product) -> Tensor | None:
        """out = epilogue(left @ right); the bias gradient or None."""
        epilogue, out, bias = p.epilogue, p.out, p.epilogue.bias
        if epilogue._replace(bias=None) == Epilogue():
            if bias is None and out.dtype == _F32:
                torch.mm(left, right, out_dtype=_F32, out=out)
                return None
            # NOTE: for small results cuBLAS may split k and add the parts in bf16.
            if out.dtype == torch.bfloat16 and out.numel() >= _LARGE:
                if bias is None:
                    torch.mm(left, right, out=out)
                    return None
                if bias.dtype == torch.bfloat16:
                    torch.addmm(bias, left, right, out=out)
                    return None
        sums = torch.mm(left, right, out_dtype=_F32)
        bias_grad = operand_sums(p.lhs) if epilogue.bias_grad == "operand" else None
        return gemm.finish(sums, bias_grad, epilogue, out, p.aux)


class Exact(Kernel):
    """Codes times scales as bf16, cuBLAS: for precision "exact", and for what the FP8 tensor cores
    have no kernels for. bf16 holds every code times its scale exactly inside its own range (2^-133
    to 2^128)."""

    op, name, rank, planner = "gemm", EXACT, 1, ExactProducts

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols")
        if reason is None and problem.precision != "exact" and not why_not_second(problem.rhs):
            reason = f"is for precision 'exact', this asks for {problem.precision!r}"
        return reason

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts("rows", "rows")

    def prepares(self, m: int, n: int, k: int) -> bool:
        return False

    def note(self, problem: Problem) -> str:
        why = why_not_second(problem.rhs) if problem.precision == "adaptive" else None
        return f"{ADAPTIVE} {why}" if why else ""


register(Adaptive())
register(Invariant())
register(Exact())
