"""The GEMM of Hopper that reads weights of 4 bits where they lie: MXFP4 codes become FP8 tiles in
its main loop, for problems of so few rows that unpacking the weights before would be a good part of
the time. From more than one block of rows on, of which each unpacks the weights anew, a cost model
says where unpacking them before, with inputs of 4 bits too, is faster: of up to 512 rows, more
always take longer here. The bits are those of the adaptive GEMM with as many parts of k."""

from copy import copy
from functools import lru_cache

from te_mx.backends.cpu import binding as cpu
from te_mx.backends.native import FP4
from te_mx.backends.sm90 import gemm
from te_mx.backends.sm90.gemm import Adaptive, Products, is_plain_fp4
from te_mx.backends.sm90.layouts.tiles import FP4_SPREAD
from te_mx.dispatch.calls import Product, Ran
from te_mx.dispatch.kernels import Plan
from te_mx.dispatch.problem import FEW_ROWS, STREAM_ROWS, Problem, whole_vectors
from te_mx.dispatch.registry import register

CODES = "sm90_codes"
BLOCK, SMALL = 128, "128x128"
# Of unpacking before, on an NVIDIA H200: microseconds of a launch, and codes a microsecond; and of
# the launch for inputs in front of this kernel (2026-11-30: of seven weights times 160 to 512 rows
# the model chose the faster way, but for two of 56 cells, by 3 %).
UNPACK_US, UNPACK_RATE, INPUT_US, INPUT_RATE = 1.5, 2.1e6, 1.6, 3e6


def best_parts(m: int, n: int, k: int, sms: int) -> int:
    """The parts of k of D[m, n] that take the least time by the model."""
    return gemm.num_splits("codes", m, n, k, sms)


def parts_before(m: int, n: int, k: int, sms: int) -> int:
    """The parts of k of D[m, n] where codes are unpacked before the product."""
    return gemm.num_splits("codes_before", m, n, k, sms)


@lru_cache(maxsize=4096)
def faster_before(m: int, n: int, k: int, sms: int, cut: bool, fp4_inputs: bool) -> bool:
    """Whether unpacking codes before the product takes less time than in its main loop, by the
    model; cut: whether k may be, into as many parts as each of them likes."""
    parts = best_parts(m, n, k, sms)
    if parts > 1 and not cut:  # blocks that are too few for the GPU
        return True
    if m <= BLOCK:
        return False
    inputs = m * k if fp4_inputs else 0
    of_packed = parts_before(m, n, k, sms) if cut else 1
    before = UNPACK_US + (n * k + inputs) / UNPACK_RATE
    before += gemm.split_us("tiles", m, n, k, sms, of_packed)
    in_loop = gemm.split_us("codes", m, n, k, sms, parts)
    return before < in_loop + fp4_inputs * INPUT_US + inputs / INPUT_RATE


@lru_cache(maxsize=4096)
def blocks_before(m: int, n: int, sms: int) -> str:
    """The blocks of D[m, n] where codes are unpacked before the product and k is in one piece; "":
    those that the product chooses, by cycles where nothing is short. NOTE: behind the launch that
    unpacks there are few, and what a step takes then counts: 512 7168 2048 takes 22.7 us in blocks
    of 128 x 128, which takes 14 % more of those cycles, and 23.7 in those with the fewest."""
    native = cpu.native()
    tiles = [] if native is None else native.sm90_gemm_tiles()
    us = {
        tile["name"].partition(",")[0]: (
            -(-(-(-m // tile["m"]) * -(-n // tile["n"])) // max(1, sms // tile["cluster"]))
            * tile["us"]
        )
        for tile in tiles
    }
    few = -(-m // BLOCK) * -(-n // BLOCK) <= 2 * sms
    return f"tile {SMALL}" if few and us and us[SMALL] == min(us.values()) else ""


class _Before(Adaptive):
    """Its products whose codes are unpacked before them."""

    def _parts(self, index: int, m: int, n: int, k: int) -> int:
        return parts_before(m, n, k, gemm.multiprocessors(index))


class Codes(Adaptive):
    """Weights plain in MXFP4, inputs in MXFP4 or MXFP8; few rows."""

    name, rank = CODES, -1

    def accepts(self, problem: Problem) -> str | None:
        reason = super().accepts(problem)
        if reason is None and not is_plain_fp4(problem.rhs):
            reason = (
                f"is for weights in {' and '.join(FP4)} that lie by rows, this has {problem.rhs}"
            )
        if reason is None and problem.m > FEW_ROWS:
            reason = f"is for at most {FEW_ROWS} rows, this has {problem.m}"
        if reason is None and not whole_vectors(problem.k):
            reason = f"reads rows of whole 16 bytes: k a multiple of 32, or 1 less; not {problem.k}"
        return reason

    @staticmethod
    def _unpacked_before(problem: Problem) -> bool:
        sms = gemm.multiprocessors(problem.place.index)
        sizes = problem.m, problem.n, problem.k
        return faster_before(*sizes, sms, problem.split_k, is_plain_fp4(problem.lhs))

    def note(self, problem: Problem) -> str:
        if self._unpacked_before(problem):
            parts = super().parts(problem)
            if parts == 1 or problem.split_k:
                return "4-bit codes are unpacked before the product, which is faster by the model"
            return (
                "4-bit codes are unpacked before the product: in the main loop that is faster "
                f"only with k in {parts} parts, which split_k allows"
            )
        return (
            "4-bit codes are unpacked in the main loop, where scales up to "
            f"2^{FP4_SPREAD} apart are aligned exactly; docs/numerics.md has the error"
        )

    def configurations(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def prepares(self, m: int, n: int, k: int) -> bool:
        return m > STREAM_ROWS

    def parts(self, problem: Problem) -> int:
        if self._unpacked_before(problem):
            return _BEFORE.parts(problem)
        return super().parts(problem)

    def _parts(self, index: int, m: int, n: int, k: int) -> int:
        return best_parts(m, n, k, gemm.multiprocessors(index))

    def make_plan(self, problem: Problem) -> Plan:
        p = problem
        sms = gemm.multiprocessors(p.place.index)
        if self._unpacked_before(p):
            whole = not p.split_k or parts_before(p.m, p.n, p.k, sms) == 1
            return _IN_BLOCKS[blocks_before(p.m, p.n, sms) if whole else ""].make_plan(p)
        in_loop = Products(self.name, p, best_parts(p.m, p.n, p.k, sms), as_is=True)
        before = super().make_plan(p)

        def multiply(product: Product) -> "Ran | None":
            aligned = product.rhs.codes.data_ptr() % 16 == 0
            return (in_loop(product) if aligned else None) or before(product)

        return multiply


_BEFORE = _Before()
_IN_BLOCKS: dict[str, _Before] = {"": _BEFORE, f"tile {SMALL}": copy(_BEFORE)}
_IN_BLOCKS[f"tile {SMALL}"].configuration = f"tile {SMALL}"
register(Codes())
