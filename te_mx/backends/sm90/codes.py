"""The GEMM of Hopper that reads weights of 4 bits where they lie: MXFP4 codes become FP8 tiles in
its main loop, in one launch, for problems of so few rows that unpacking the weights before would be
a good part of the time: up to 512, where it takes about as long as unpacking them before; more take
longer. The bits are those of the adaptive GEMM with as many parts of k."""

from __future__ import annotations

from functools import lru_cache

from te_mx.backends.native import FP4, native_operand
from te_mx.backends.sm90 import binding, binding_codes, split_k
from te_mx.backends.sm90.gemm import ADAPTIVE, Adaptive, Scratches
from te_mx.dispatch.calls import Product, Ran
from te_mx.dispatch.problem import FEW_ROWS, Problem, whole_vectors
from te_mx.dispatch.registry import PreparedGemm, register
from te_mx.layouts import spec_of
from te_mx.layouts.sm90_tiles import FP4_SPREAD

CODES = "sm90_codes"
# CTAs of a cluster. More than 6 do not all find room at once beside each other in a GPC.
MOST_PARTS = 6
BLOCK, STEP_K = 128, 128
# Microseconds on an NVIDIA H200 (2026-11-24): a launch, a step of k of a wave, and the exchange of
# sums inside a cluster, which computes one block and is launched anew for the next. GAIN: what
# cutting k must win. ROOM: the share of multiprocessors that clusters of more than 2 take.
LAUNCH_US, STEP_US, EXCHANGE_US, GAIN, ROOM = 6.3, 0.58, 2.0, 1.05, 0.9


def is_plain_fp4(spec: str) -> bool:
    """Whether an operand lies in codes of 4 bits, two a byte along k."""
    fmt, layout = spec_of(spec)
    return fmt.untransformed.name in FP4 and layout.name == "rows"


@lru_cache(maxsize=4096)
def best_parts(m: int, n: int, k: int, sms: int) -> int:
    """The parts of k of D[m, n] that take the least time by the model."""
    blocks, steps = -(-m // BLOCK) * -(-n // BLOCK), -(-k // STEP_K)

    def us(parts: int) -> float:
        at_once = sms // parts if parts <= 2 else int(ROOM * sms) // parts
        waves = -(-blocks // max(1, at_once))
        if parts == 1:
            return LAUNCH_US + waves * steps * STEP_US
        return GAIN * waves * (LAUNCH_US + -(-steps // parts) * STEP_US + EXCHANGE_US)

    return min(range(1, min(steps, MOST_PARTS) + 1), key=us)


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

    def note(self, problem: Problem) -> str:
        if self._unpacked_before(problem.split_k, self.parts(problem)):
            return (
                "4-bit codes are unpacked before the product: in the main loop that is faster "
                f"only with k in {self.parts(problem)} parts, which split_k allows"
            )
        return (
            "4-bit codes are unpacked in the main loop, where scales up to "
            f"2^{FP4_SPREAD} apart are aligned exactly; docs/numerics.md has the error"
        )

    def configurations(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def prepared(self, problem: Problem) -> PreparedGemm | None:
        return None

    def _made(self, p: Product) -> None:
        return None

    def _parts(self, index: int, m: int, n: int, k: int) -> int:
        return best_parts(m, n, k, split_k.multiprocessors(index))

    @staticmethod
    def _unpacked_before(split_k: bool, parts: int) -> bool:
        """Blocks that are too few for the GPU take longer here, where k may not be cut."""
        return parts > 1 and not split_k

    def multiply(self, p: Product, scratch: Scratches) -> Ran | None:
        lhs, rhs = native_operand(p.lhs), native_operand(p.rhs)
        parts = self._parts(p.out.device.index, p.lhs.rows, p.rhs.rows, p.lhs.k)
        done, bias_grad = False, None
        if not self._unpacked_before(p.mode.split_k, parts):
            done, bias_grad = binding_codes.gemm(
                rhs, lhs, p.epilogue, p.out, p.aux, p.mode.spread, scratch, parts
            )
        if not done:
            made = super().multiply(p, scratch)
            return made and made._replace(name=ADAPTIVE)
        if p.epilogue.bias_grad == "operand":
            bias_grad = binding.operand_sums(lhs, scratch)
        return Ran(self.name, bias_grad)


register(Codes())
