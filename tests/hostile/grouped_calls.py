"""The table of te_mx.grouped_linear and te_mx.grouped_wgrad."""

from __future__ import annotations

import torch
from function_calls import K, floats
from judge import Call
from malformed import FLAG, OPTIONAL_DTYPE, RECIPE, changed, values
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
GROUPED = (
    Call(
        "te_mx.grouped_linear", lambda d: te_mx.grouped_linear,
        lambda d: {"inp": floats(d, R, K), "weight": floats(d, G, 40, K), "offs": offsets(),
                   "bias": floats(d, G, 40), "recipe": None},
        {"inp": INPUT | DIMENSIONS, "weight": SHAPED, "offs": OFFSETS, "recipe": RECIPE,
         "bias": SHAPED.but("None")},
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
        "te_mx.grouped_wgrad", lambda d: te_mx.grouped_wgrad,
        lambda d: {"grad": floats(d, R, 40), "inp": floats(d, R, K), "offs": offsets(),
                   "out": None, "out_dtype": torch.float32, "accumulate": False, "recipe": None},
        {"grad": SHAPED.but("column less", "column more", "no columns"),
         "inp": SHAPED.but("column less", "column more", "no columns"), "offs": OFFSETS.but(
             "one less", "one more", "none at all"),
         "out_dtype": OPTIONAL_DTYPE | values(float64=torch.float64), "accumulate": FLAG,
         "recipe": RECIPE},
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
        "te_mx.grouped_linear with offs on its device", lambda d: te_mx.grouped_linear,
        lambda d: {"inp": floats(d, R, K), "weight": floats(d, G, 40, K), "offs": offsets().to(d)},
        {"offs": INDEX.but("beyond the end", "beyond 64 bits")},  # cut off there, unseen
        covers="te_mx.grouped_linear",
    ),
)  # fmt: skip
