"""The native CPU quantizer against a numpy oracle, byte for byte, at every ISA level."""

import numpy as np
import pytest
import quantize_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("te_mx._native")

DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FMT = {"e4m3": 0, "e5m2": 1}
RULE = {"rceil": 0, "floor": 1}
LEVELS = [level for level in range(5) if native.isa_available(level)]
LAYOUT = native.LAYOUTS
BAD_ARGUMENT, UNSUPPORTED = 1, 2
GUARD = 64
ALL = [(fmt, rule) for fmt in FMT for rule in RULE]


@pytest.fixture(autouse=True)
def restore_isa():
    level = native.isa_current()
    yield
    native.set_isa(level)


class Output:
    """Poisoned bytes of a shape between guard bytes that must survive."""

    def __init__(self, *shape, poison=0xA5):
        self.shape, self.n, self.poison = shape, int(np.prod(shape)), poison
        self.data = torch.full((self.n + 2 * GUARD,), poison, dtype=torch.uint8)

    @property
    def address(self):
        return self.data.data_ptr() + GUARD

    def array(self):
        a = self.data.numpy()
        assert (a[:GUARD] == self.poison).all() and (a[GUARD + self.n :] == self.poison).all()
        return a[GUARD : GUARD + self.n].reshape(self.shape)


def quantize(
    x, fmt, rule="rceil", *, rowwise=True, columnwise=None, col_sum=False, threads=1, poison=0xA5
):
    """Row (codes, scales), column (codes, scales) as [cols, ...], column sums."""
    rows, cols = x.shape
    rb, cb = -(-rows // 32), -(-cols // 32)
    transposed = columnwise == "transposed"
    row = [Output(rows, cols, poison=poison), Output(rows, cb, poison=poison)]
    col = [
        Output(*((cols, rows) if transposed else (rows, cols)), poison=poison),
        Output(*((cols, rb) if transposed else (rb, cols)), poison=poison),
    ]
    sums = torch.full((cols,), 7.0)
    workspace = torch.full((-(-rows // native.COL_SUM_ROWS), cols), 7.0)
    args = native.QuantizeArgs(
        x_data=x.data_ptr(), x_rows=rows, x_cols=cols, x_row_stride=x.stride(0),
        x_col_stride=x.stride(1), x_dtype=DTYPE[x.dtype], element=FMT[fmt], rule=RULE[rule],
        col_layout=LAYOUT["k_last" if transposed else "k_first"], threads=threads,
    )  # fmt: skip
    if rowwise:
        args.row_codes, args.row_scales = (o.address for o in row)
    if columnwise:
        args.col_codes, args.col_scales = (o.address for o in col)
    if col_sum:
        args.col_sum, args.col_sum_ws = sums.data_ptr(), workspace.data_ptr()
    assert native.quantize(args) == 0
    row, col = [o.array() for o in row], [o.array() for o in col]
    if not transposed:
        col = [a.T for a in col]
    return row, col, sums.numpy()


def check(x, fmt, rule, *, rowwise=True, columnwise=None, col_sum=False, threads=1, levels=LEVELS):
    """Every level against the oracle."""
    x32 = x.float().numpy()
    expected = {}
    if rowwise:
        expected["row"] = oracle.quantize(x32, fmt, rule)
    if columnwise:
        expected["col"] = oracle.quantize(np.ascontiguousarray(x32.T), fmt, rule)
    for level in levels:
        native.set_isa(level)
        row, col, sums = quantize(
            x,
            fmt,
            rule,
            rowwise=rowwise,
            columnwise=columnwise,
            col_sum=col_sum,
            threads=threads,
            poison=0xA5 ^ level,
        )
        for direction, got in (("row", row), ("col", col)):
            if direction in expected:
                for name, g, e in zip(("codes", "scales"), got, expected[direction], strict=True):
                    np.testing.assert_array_equal(g, e, err_msg=f"{direction} {name}, isa {level}")
        if col_sum:
            np.testing.assert_array_equal(sums, oracle.column_sums(x32, native.COL_SUM_ROWS))


def strided(x, how):
    """The same values with other strides."""
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "padded":
        return torch.nn.functional.pad(x, (3, 5), value=float("nan"))[:, 3:-5]
    if how == "every_other":
        wide = torch.full((x.shape[0] * 2, x.shape[1] * 2), float("nan"), dtype=x.dtype)
        wide[::2, ::2] = x
        return wide[::2, ::2]
    return x


sizes = st.one_of(st.sampled_from([1, 31, 32, 33, 63, 64, 65, 96, 128]), st.integers(1, 280))


@settings(max_examples=200, deadline=None)
@given(
    rows=sizes,
    cols=sizes,
    dtype=st.sampled_from(list(DTYPE)),
    kind=st.sampled_from(oracle.KINDS),
    how=st.sampled_from(["contiguous", "transposed", "padded", "every_other"]),
    case=st.sampled_from(ALL),
    directions=st.sampled_from(
        [(row, col) for row in (True, False) for col in (None, "plain", "transposed")]
    ),
    col_sum=st.booleans(),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_oracle(rows, cols, dtype, kind, how, case, directions, col_sum, threads, seed):
    x = torch.from_numpy(oracle.adversarial(np.random.default_rng(seed), rows, cols, kind))
    check(
        strided(x.to(dtype), how),
        *case,
        rowwise=directions[0],
        columnwise=directions[1],
        col_sum=col_sum,
        threads=threads,
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(250, 700),
    cols=st.integers(1, 33),
    dtype=st.sampled_from(list(DTYPE)),
    kind=st.sampled_from(oracle.KINDS),
    case=st.sampled_from(ALL),
    directions=st.sampled_from([(True, None), (False, "plain"), (True, "plain")]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_many_rows_of_few_columns(rows, cols, dtype, kind, case, directions, threads, seed):
    """Matrices that are quantized as runs of 32 rows, some of which take the exact path."""
    x = torch.from_numpy(oracle.adversarial(np.random.default_rng(seed), rows, cols, kind))
    rowwise, columnwise = directions
    check(x.to(dtype), *case, rowwise=rowwise, columnwise=columnwise, threads=threads)


@pytest.mark.parametrize("columnwise", [None, "plain", "transposed"])
@pytest.mark.parametrize("dtype", DTYPE, ids=str)
def test_large_outputs_and_many_threads(dtype, columnwise):
    # Above the size where stores bypass the caches, over many work items.
    x = torch.from_numpy(oracle.adversarial(np.random.default_rng(5), 2112, 4096, "normal"))
    reference = None
    for threads in (1, 2, 5):
        for level in LEVELS[-1:] if threads > 1 else (LEVELS[0], LEVELS[-1]):
            native.set_isa(level)
            got = quantize(
                x.to(dtype), "e4m3", columnwise=columnwise, threads=threads, col_sum=True
            )
            flat = [*got[0], *(got[1] if columnwise else ()), got[2]]
            if reference is None:
                reference = flat
            for a, b in zip(reference, flat, strict=True):
                assert a.tobytes() == b.tobytes()
    part = slice(1000, 1064)
    codes, scales = oracle.quantize(x.to(dtype)[part].float().numpy(), "e4m3", "rceil")
    np.testing.assert_array_equal(reference[0][part], codes)
    np.testing.assert_array_equal(reference[1][part], scales)


def all_finite_or_not(dtype):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype)


@pytest.mark.parametrize("fmt,rule", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value(dtype, fmt, rule):
    values = all_finite_or_not(dtype)
    check(values[:, None], fmt, rule)  # blocks of one element
    finite = values[torch.isfinite(values)]
    finite = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]
    tops = [448.0, 1.0, 449.0, 6e-5] if dtype == torch.float16 else [448.0, 1e-30, 3e38, 1e-37]
    for top in tops:
        below = finite[finite.abs().float() <= top]
        below = below[: len(below) // 31 * 31].reshape(-1, 31)
        block = torch.cat([torch.full((len(below), 1), top, dtype=dtype), below], 1)
        check(block, fmt, rule)
        check(block.t(), fmt, rule, rowwise=False, columnwise="plain")


@pytest.mark.parametrize("fmt,rule", ALL)
def test_fp32_near_every_rounding_boundary(fmt, rule):
    # One ulp below, on and above every code and midpoint, under several scales.
    name = oracle.OF_ELEMENT[fmt]
    grid = np.arange(0, 256, dtype=np.uint8).view(oracle.DTYPES[name]).astype(np.float32)
    grid = np.unique(np.abs(grid[np.isfinite(grid)]))
    grid = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    grid = np.concatenate(
        [grid, np.nextafter(grid, np.float32(0)), np.nextafter(grid, np.float32(1e9))]
    )
    grid = np.concatenate([grid[grid <= oracle.MAX[name]], -grid[grid <= oracle.MAX[name]]])
    grid = grid[: len(grid) // 31 * 31].reshape(-1, 31)
    top = np.full((len(grid), 1), oracle.MAX[name], np.float32)
    for k in (-140, -127, -126, -100, 0, 7, 100):
        with np.errstate(all="ignore"):
            x = np.concatenate([top, grid], 1) * np.exp2(np.float64(k))
        check(torch.from_numpy(x.astype(np.float32)), fmt, rule, columnwise="transposed")


@pytest.mark.parametrize("fmt,rule", ALL)
def test_scale_byte_boundaries(fmt, rule):
    # Mantissas around 1.0, 1.5 and 1.75 under every fp32 exponent.
    near = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, *range(0x5FFFFE, 0x600005), 0x7FFFFF])
    bits = (np.arange(256)[:, None] << 23 | near).astype(np.uint32).reshape(-1, 1)
    check(torch.from_numpy(bits.view(np.float32)), fmt, rule, columnwise="plain")


GOLDEN = [(0.875, 118), (0.9, 119), (1.75, 119), (1.7578125, 120), (447.0, 127), (448.0, 127)]
GOLDEN += [(449.0, 128), (3.3895e38, 247)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("amax,byte", GOLDEN)
def test_golden_scale_bytes(amax, byte, level):
    native.set_isa(level)
    (_, scales), _, _ = quantize(torch.full((1, 32), -amax), "e4m3")
    assert scales.tolist() == [[byte]]


@pytest.mark.parametrize("level", LEVELS)
def test_golden_blocks(level):
    native.set_isa(level)
    (codes, scales), _, _ = quantize(torch.tensor([[0.0, -0.0]]), "e4m3")
    assert codes.tolist() == [[0, 0x80]] and scales.tolist() == [[0]]
    for bad in (float("nan"), float("inf"), -float("inf")):
        (codes, scales), _, _ = quantize(torch.tensor([[1.0, bad, -2.0, 0.0]]), "e5m2")
        assert codes.tolist() == [[0x7F] * 4] and scales.tolist() == [[255]]
    (codes, scales), _, _ = quantize(torch.tensor([[2.0**-126, 2.0**-133]]), "e4m3")
    assert codes.tolist() == [[0x40, 0x08]] and scales.tolist() == [[0]]


@pytest.mark.parametrize("fmt,rule", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_power_of_two_moves_the_byte_and_keeps_the_codes(dtype, fmt, rule):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).clamp(-4, 4)
    x[:, ::32] = 3.0
    x = x.to(dtype)
    for level in LEVELS:
        native.set_isa(level)
        (codes, scales), _, _ = quantize(x, fmt, rule)
        for k in (-100, -60, -1, 1, 60, 120):
            (c, s), _, _ = quantize(x * 2.0**k, fmt, rule)
            np.testing.assert_array_equal(s.astype(int), scales.astype(int) + k)
            moved = (x.float() * 2.0**k).to(dtype).float() / 2.0**k == x.float()
            np.testing.assert_array_equal(c[moved.numpy()], codes[moved.numpy()])


def test_flush_to_zero_mode_changes_nothing():
    x = torch.from_numpy(oracle.adversarial(np.random.default_rng(3), 96, 160, "row_scales"))
    expected = oracle.quantize(x.numpy(), "e4m3", "rceil"), oracle.column_sums(x.numpy(), 256)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        got = []
        for level in LEVELS:
            native.set_isa(level)
            got.append(quantize(x, "e4m3", columnwise="plain", col_sum=True))
    finally:
        torch.set_flush_denormal(False)
    for row, _, sums in got:
        np.testing.assert_array_equal(row[0], expected[0][0])
        np.testing.assert_array_equal(row[1], expected[0][1])
        np.testing.assert_array_equal(sums, expected[1])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(shape):
    _, _, sums = quantize(torch.empty(shape), "e4m3", columnwise="plain", col_sum=True)
    assert (sums == 0).all() or shape[0] > 0


def test_bad_arguments():
    x, memory = torch.zeros(4, 4), torch.zeros(64, dtype=torch.uint8)
    out = memory.data_ptr()
    good = native.QuantizeArgs(
        x_data=x.data_ptr(), x_rows=4, x_cols=4, x_row_stride=4, row_codes=out, row_scales=out
    )
    assert native.quantize(good) == 0
    for field, value in (
        ("x_data", 0), ("x_rows", -1), ("x_dtype", 3), ("element", 7),
        ("rule", len(native.SCALE_RULES)),
        ("block_k", 0), ("row_scales", 0), ("col_codes", out), ("col_sum", out),
    ):  # fmt: skip
        assert native.quantize(good.copy(**{field: value})) == BAD_ARGUMENT
    for field, value in (
        ("element", 2), ("element", 5), ("rule", 3), ("rule", 4), ("block_k", 128),
        ("block_rows", 128),
        ("scale_type", 1), ("row_layout", LAYOUT["k_first"]), ("col_layout", LAYOUT["tiles"]),
    ):  # fmt: skip
        assert native.quantize(good.copy(**{field: value})) == UNSUPPORTED
