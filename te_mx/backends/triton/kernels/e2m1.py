"""E2M1 in NVIDIA's instructions: words of eight codes, the first in the low bits.

Beside 2^24 a step is the last bit: of 1 below, where codes 0 to 3 lie, of 2 above, where 4 to 6 do;
a second sum of x / 10, a little less, says 6 or 7 of what is more than 3.5, as 5 is the last of 6.
The least of both is the code: to nearest even, with no branch."""

import triton.language as tl

_BASE = 0x4B800000 - 4  # the bits of 2^24 - 4
_K = -sum(_BASE << 4 * i for i in range(8)) & 0xFFFFFFFF
_REGISTERS = ".reg .f32 v, w; .reg .b32 y, t, p, q, r, s, l<8>, h<8>, c<8>;"


def _word(out: str, values: list[str], factor: str, eighths: bool, signs: str) -> str:
    """Eight codes, where `signs` leaves bytes of signs in p (of even ones) and q. eighths: factors
    are divided by 8 and so are magnitudes, up to 1."""
    twice, tenth = ("41800000", "3FCCCCCC") if eighths else ("40000000", "3E4CCCCC")
    text = ""
    for i, value in enumerate(values):
        text += f" mov.b32 v, {value}; abs.f32 v, v; mul.rn{'.sat' * eighths}.f32 v, v, {factor};"
        text += "" if eighths else " min.f32 v, v, 0f41000000;"
        text += (
            f" fma.rn.f32 w, v, 0f{twice}, 0f4B7FFFFC; mov.b32 y, w; fma.rn.f32 w, v, 0f{tenth},"
            f" 0f4B800002; mov.b32 t, w; min.s32 c{i}, y, t;"
        )
    text += f" add.u32 t, c0, {_K};"
    text += "".join(f" mad.lo.u32 t, c{i}, {16**i}, t;" for i in range(1, 8))
    text += f" {signs} and.b32 p, p, 0x08080808; or.b32 t, t, p; and.b32 q, q, 0x80808080;"
    return f"{text} or.b32 {out}, t, q;"


def _bytes(to: str, four: list[str], pick: str) -> str:
    """The signs of four registers, or of one half of each, filling bytes."""
    a, b, c, d = four
    return (
        f" prmt.b32 r, {a}, {b}, 0xFBD9; prmt.b32 s, {c}, {d}, 0xFBD9; prmt.b32 {to}, r, s, {pick};"
    )


def _halves(words: list[str]) -> str:
    return "".join(
        f" shl.b32 l{i}, {one}, 16; and.b32 h{i}, {one}, 0xffff0000;"
        for i, one in enumerate(words)
    )


def _values() -> str:
    """Of eight fp32 numbers, for a factor."""
    x = [f"${i}" for i in range(1, 9)]
    signs = _bytes("p", x[::2], "0x7632") + _bytes("q", x[1::2], "0x7632")
    return f"{{ {_REGISTERS} {_word('$0', x, '$9', False, signs)} }}"


def _row() -> str:
    """Of eight bf16 numbers in four words, for an eighth of a factor."""
    words = ["$1", "$2", "$3", "$4"]
    values = [f"{half}{i}" for i in range(4) for half in "lh"]
    signs = _bytes("p", words, "0x5410") + " prmt.b32 q, r, s, 0x7632;"
    return f"{{ {_REGISTERS}{_halves(words)} {_word('$0', values, '$5', True, signs)} }}"


def _columns() -> str:
    """Two words, of both halves of eight words, for an eighth of a factor each."""
    words = [f"${i}" for i in range(2, 10)]
    made = f"{{ {_REGISTERS}{_halves(words)}"
    for out, half, factor, pick in (("$0", "l", "$10", "0x5410"), ("$1", "h", "$11", "0x7632")):
        signs = _bytes("p", words[::2], pick) + _bytes("q", words[1::2], pick)
        made += _word(out, [f"{half}{i}" for i in range(8)], factor, True, signs)
    return f"{made} }}"


VALUES, ROW, COLUMNS = tl.constexpr(_values()), tl.constexpr(_row()), tl.constexpr(_columns())
