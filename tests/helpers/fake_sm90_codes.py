"""The GEMM of te_mx._sm90 that reads plain codes of 4 bits, in plain torch (fake_sm90.py)."""

from __future__ import annotations

from te_mx.backends.base import FORMATS, LAYOUTS

__all__ = ["codes_workspace_bytes", "gemm_codes", "unpack", "unpack_two"]

CALLS: list[tuple[int, int, int, int]] = []  # m, n, k and parts
LHS: list[str] = []  # how lhs lay
UNPACKED: list[int] = []  # operands that a launch unpacked before a product
_FP4, _PLAIN, _TILES = FORMATS["e2m1"], LAYOUTS["k_last"], LAYOUTS["sm90"]
_STANDING = LAYOUTS["sm90_nvfp4"]
_SCRATCH = 192  # bytes that every GEMM of the stand-in asks for


def codes_workspace_bytes(args) -> int:
    from fake_sm90 import packed_bytes

    plain = args.lhs.layout == _PLAIN
    return _SCRATCH + (packed_bytes(args.lhs_rows, args.lhs_k)[0] if plain else 0)


def gemm_codes(args) -> int:
    from fake_sm90 import gemm

    assert args.rhs.layout == _PLAIN and args.rhs_element == _FP4
    assert args.lhs.layout in (_TILES, _PLAIN)
    assert args.lhs.layout == _TILES or args.lhs_element == _FP4
    assert -(-args.rhs.k // 2) % 16 == 0 and args.rhs.codes % 16 == 0
    assert args.workspace_bytes >= codes_workspace_bytes(args)
    assert args.kernel == -1 and 1 <= args.parts <= min(8, -(-args.lhs_k // 128))
    LHS.append("tiles" if args.lhs.layout == _TILES else "plain")
    CALLS.append((args.lhs_rows, args.rhs_rows, args.lhs_k, args.parts))
    return gemm(args)


def unpack(*sides) -> int:
    from fake_sm90 import pack

    for args in sides:
        assert args.operand.layout in (_PLAIN, _STANDING) and args.operand.element == _FP4
        assert args.operand.k == sides[0].operand.k
        pack(args)
    UNPACKED.append(len(sides))
    return 0


unpack_two = unpack
