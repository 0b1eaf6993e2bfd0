"""The table of te_mx.grouped_linear and te_mx.grouped_wgrad."""

from __future__ import annotations

import torch
from function_calls import K, floats
from judge import Call
from malformed import COUNT, DTYPE, FLAG, OPTIONAL_DTYPE, RECIPE, changed, other_than, values
from malformed_tensors import DIMENSIONS, INDEX, INPUT, OFFSETS, ROWS, SHAPED, output, plain
from torch import Tensor

import te_mx

R, G = 24, 2


def offsets() -> Tensor:
    """Where the host can look at them, also if the rest is on a GPU."""
    return torch.tensor([10, 23])


LISTS = changed(
    None,
    None_inside=lambda x: [x[0], None],
    a_float_inside=lambda x: [x[0], 1.0],
    one_less=lambda x: x[:-1],
    empty=lambda x: [],
    a_generator_of_nothing=lambda x: (each for each in ()),
    another_shape_inside=lambda x: [x[0], x[1][..., :-1]],
    another_dtype_inside=lambda x: [x[0], x[1].double()],
    an_int_dtype_inside=lambda x: [x[0], x[1].int()],
    meta_inside=lambda x: [x[0], x[1].to("meta")],
    a_scalar_inside=lambda x: [x[0], x[1].flatten()[0]],
) | changed(
    lambda x: [plain(each) for each in x],
    a_tuple=tuple,
    a_generator=lambda x: (each for each in x),
    negative_views=lambda x: [torch._neg_view(-each) for each in x],
    transposed_in_memory=lambda x: [each.movedim(-1, 0).contiguous().movedim(0, -1) for each in x],
)
ALIGNMENT = COUNT.but("huge") | values(nothing=0)


def tokens(d: str, *shape: int) -> te_mx.MXTensor:
    return te_mx.quantize(floats(d, *shape))


def columns(d: str, *shape: int) -> te_mx.MXTensor:
    return te_mx.quantize(floats(d, *shape), rowwise=False, columnwise=True)


def stack(d: str) -> te_mx.MXTensor:
    return te_mx.quantize(floats(d, G, 40, K), fmt="mxfp6_e3m2")


QUANTIZED = (
    other_than() | values(a_pair=lambda: (torch.ones(2), torch.ones(2)))
    | changed(
        None, meta=lambda x: x.to("meta"), its_codes=lambda x: x.rowwise_data,
        its_values=lambda x: x.dequantize(),
        another_k=lambda x: te_mx.quantize(torch.ones(*x.shape[:-1], 71)).to(x.device),
        columns_alone=lambda x: te_mx.quantize(
            torch.ones(x.shape), rowwise=False, columnwise=True
        ).to(x.device),
        a_line=lambda x: te_mx.quantize(torch.ones(K)).to(x.device),
        square_blocks=lambda x: te_mx.quantize(
            torch.ones(x.shape), fmt="fp8_e4m3_128x128"
        ).to(x.device),
    )
)  # fmt: skip
TOKENS = QUANTIZED
COLUMNS = (
    other_than() | values(a_pair=lambda: (torch.ones(2), torch.ones(2)))
    | changed(
        None, meta=lambda x: x.to("meta"), its_codes=lambda x: x.columnwise_data,
        its_values=lambda x: x.dequantize(usage="columnwise"),
        rows_alone=lambda x: te_mx.quantize(torch.ones(x.shape)).to(x.device),
        more_rows=lambda x: columns(str(x.device), x.rows + 32, x.cols),
        a_line=lambda x: columns(str(x.device), x.rows),
        square_blocks=lambda x: te_mx.quantize(
            torch.ones(x.shape), fmt="fp8_e4m3_128x128", rowwise=False, columnwise=True
        ).to(x.device),
    )
)  # fmt: skip
STACK = QUANTIZED | changed(
    None, no_groups=lambda x: te_mx.quantize(torch.ones(0, 40, K)).to(x.device),
    a_group_more=lambda x: te_mx.quantize(torch.ones(G + 1, 40, K)).to(x.device),
)  # fmt: skip
GROUPED = (
    Call(
        "te_mx.grouped_linear", lambda d: te_mx.grouped_linear,
        lambda d: {"inp": floats(d, R, K), "weight": floats(d, G, 40, K), "offs": offsets(),
                   "bias": floats(d, G, 40), "recipe": None, "alignment": 1},
        {"inp": INPUT | DIMENSIONS, "weight": SHAPED, "offs": OFFSETS, "recipe": RECIPE,
         "bias": SHAPED.but("None"), "alignment": ALIGNMENT},
        says={"inp": "inp|weight", "weight": "weight|bias"},
    ),
    Call(
        "te_mx.grouped_linear of lists", lambda d: te_mx.grouped_linear,
        lambda d: {"inp": floats(d, R, K), "weight": [floats(d, 40, K), floats(d, 40, K)],
                   "offs": offsets(), "bias": [floats(d, 40), floats(d, 40)]},
        {"weight": LISTS, "bias": LISTS},
        covers="te_mx.grouped_linear", says={"weight": "weight|bias"},
    ),
    Call(
        "te_mx.grouped_linear by index", lambda d: te_mx.grouped_linear,
        lambda d: {"inp": floats(d, R, K), "weight": floats(d, G, 40, K),
                   "index": torch.arange(R) % 3 - 1},
        {"inp": INPUT | ROWS | DIMENSIONS, "index": INDEX},
        covers="te_mx.grouped_linear", says={"inp": "inp|index", "index": "index|offs"},
    ),
    Call(
        "te_mx.grouped_linear masked", lambda d: te_mx.grouped_linear,
        lambda d: {"inp": floats(d, G, 12, K), "weight": floats(d, G, 40, K),
                   "masked_m": torch.tensor([5, 12])},
        {"inp": INPUT.but("endless") | ROWS | DIMENSIONS,
         "masked_m": INDEX | changed(None, negative=lambda x: x - 10**6)},
        covers="te_mx.grouped_linear", says={"inp": "inp", "masked_m": "masked_m|offs"},
    ),
    Call(
        "te_mx.grouped_linear of quantized weights", lambda d: te_mx.grouped_linear,
        lambda d: {"inp": floats(d, R, K), "weight": stack(d), "offs": offsets(),
                   "bias": [floats(d, 40), floats(d, 40)]},
        {"inp": INPUT | DIMENSIONS, "weight": STACK.but("its values"), "bias": LISTS},
        covers="te_mx.grouped_linear",
        says={"inp": "inp|weight", "weight": "weight|offs|bias"},
    ),
    Call(
        "te_mx.grouped_gemm", lambda d: te_mx.grouped_gemm,
        lambda d: {"inp": tokens(d, R, K), "weight": stack(d), "offs": offsets(),
                   "alignment": 8, "bias": floats(d, G, 40), "out_dtype": torch.float32,
                   "zero_padding": True, "recipe": None},
        {"inp": TOKENS, "weight": STACK, "offs": OFFSETS, "alignment": ALIGNMENT,
         "bias": SHAPED.but("None"), "zero_padding": FLAG, "recipe": RECIPE,
         "out_dtype": DTYPE | values(float64=torch.float64)},
        says={"inp": "inp|weight", "weight": "weight|offs|bias"},
    ),
    Call(
        "te_mx.grouped_gemm of a sequence by index", lambda d: te_mx.grouped_gemm,
        lambda d: {"inp": tokens(d, R, K), "weight": [tokens(d, 40, K), tokens(d, 40, K)],
                   "index": torch.arange(R) % 3 - 1},
        {"inp": TOKENS, "index": INDEX,
         "weight": changed(None, a_hole=lambda x: [x[0], None], one_less=lambda x: x[:-1],
                           empty=lambda x: [], plain_ones=lambda x: [w.dequantize() for w in x],
                           another_shape=lambda x: [x[0], tokens(x[0].device, 39, K)],
                           another_format=lambda x: [x[0], te_mx.quantize(
                               torch.ones(40, K), fmt="e5m2").to(x[0].device)],
                           on_meta=lambda x: [x[0], x[1].to("meta")])},
        covers="te_mx.grouped_gemm", says={"inp": "inp|index", "weight": "weight|index",
                                           "index": "index|offs"},
    ),
    Call(
        "te_mx.grouped_gemm of tokens that are not quantized", lambda d: te_mx.grouped_gemm,
        lambda d: {"inp": floats(d, R, K).bfloat16(), "weight": stack(d), "offs": offsets(),
                   "bias": floats(d, G, 40)},
        {"inp": INPUT | DIMENSIONS, "weight": STACK, "offs": OFFSETS,
         "bias": SHAPED.but("None")},
        covers="te_mx.grouped_gemm", says={"inp": "inp|weight|offs", "weight": "weight|offs|bias"},
    ),
    Call(
        "te_mx.grouped_gemm into out", lambda d: te_mx.grouped_gemm,
        lambda d: {"inp": floats(d, R, K).bfloat16(), "weight": [tokens(d, 8, K)] * G,
                   "offs": offsets(), "out": torch.ones(R, 8, device=d).bfloat16(),
                   "accumulate": True},
        {"out": output("inp"), "accumulate": FLAG},
        covers="te_mx.grouped_gemm",
    ),
    Call(
        "te_mx.grouped_gemm masked", lambda d: te_mx.grouped_gemm,
        lambda d: {"inp": tokens(d, G, 12, K), "weight": stack(d),
                   "masked_m": torch.tensor([5, 12])},
        {"inp": TOKENS, "masked_m": INDEX | changed(None, negative=lambda x: x - 10**6)},
        covers="te_mx.grouped_gemm", says={"masked_m": "masked_m|offs"},
    ),
    Call(
        "te_mx.grouped_wgrad", lambda d: te_mx.grouped_wgrad,
        lambda d: {"grad": floats(d, R, 40), "inp": floats(d, R, K), "offs": offsets(),
                   "out": None, "out_dtype": torch.float32, "accumulate": False, "recipe": None,
                   "alignment": 8},
        {"grad": SHAPED.but("column less", "column more", "no columns"),
         "inp": SHAPED.but("column less", "column more", "no columns"), "offs": OFFSETS.but(
             "one less", "one more", "none at all"),
         "out_dtype": OPTIONAL_DTYPE | values(float64=torch.float64), "accumulate": FLAG,
         "recipe": RECIPE, "alignment": ALIGNMENT},
        says={"accumulate": "accumulate|out"},
    ),
    Call(
        "te_mx.grouped_wgrad into out", lambda d: te_mx.grouped_wgrad,
        lambda d: {"grad": floats(d, R, 8), "inp": floats(d, R, 8), "offs": offsets(),
                   "out": torch.ones(G, 8, 8, device=d), "accumulate": True},
        {"out": output("grad", "inp"), "accumulate": FLAG},
        covers="te_mx.grouped_wgrad",
    ),
    Call(
        "te_mx.grouped_wgrad of quantized operands", lambda d: te_mx.grouped_wgrad,
        lambda d: {"grad": columns(d, 64, 40), "inp": columns(d, 64, K),
                   "offs": torch.tensor([10, 50]), "alignment": 32},
        {"grad": COLUMNS, "inp": COLUMNS, "alignment": ALIGNMENT | values(of_no_blocks=5),
         "offs": OFFSETS.but("one less", "one more", "none at all")},
        covers="te_mx.grouped_wgrad", says={"alignment": "alignment|group|offs"},
    ),
    Call(
        "te_mx.grouped_wgrad of quantized operands into out", lambda d: te_mx.grouped_wgrad,
        lambda d: {"grad": columns(d, 64, 8), "inp": columns(d, 64, 8),
                   "offs": torch.tensor([10, 50]),
                   "out": torch.ones(G, 8, 8, device=d), "accumulate": True, "alignment": 32},
        {"out": output(), "accumulate": FLAG},
        covers="te_mx.grouped_wgrad",
    ),
    Call(
        "te_mx.grouped_linear with offs on its device", lambda d: te_mx.grouped_linear,
        lambda d: {"inp": floats(d, R, K), "weight": floats(d, G, 40, K), "offs": offsets().to(d)},
        {"offs": INDEX.but("beyond the end", "beyond 64 bits")},  # cut off there, unseen
        covers="te_mx.grouped_linear",
    ),
)  # fmt: skip
