"""The table of te_mx.formats and of what formats other than MXFP8 change: recipes, MXTensors, GEMMs
and layers."""

from __future__ import annotations

from typing import Any

import torch
from function_calls import GEMM_KINDS, PARTS, K, M, N, floats, mx
from judge import Call
from malformed import (
    COUNT,
    DTYPE,
    FLAG,
    OPTIONAL_FLAG,
    OPTIONAL_WORD,
    UPPER_CASE,
    WORD,
    changed,
    values,
)
from malformed_tensors import (
    LAYOUTS,
    META,
    NO_TENSOR,
    NOT_FLOATS,
    SCALAR,
    SHAPED,
    SHARED_ROWS,
    STRIDES,
    VECTOR,
    output,
)
from module_calls import FORWARD, inputs, module, trained
from other_calls import FLAGS, OVERRIDE

import te_mx
from te_mx import formats, recipe
from te_mx.formats.stochastic import random_bits

FORMAT = WORD | UPPER_CASE | values(
    its_class=lambda: formats.Format, its_element=lambda: formats.get("mxfp4").element,
    one_that_is_not_registered=lambda: formats.Format(
        "mxfp4", formats.get("mxfp4").element, formats.Scaling()
    ),
)  # fmt: skip
MIXED = recipe.BlockScaling("mxfp4", "mxfp6_e2m3", "mxfp8_e5m2")


# ------------------------------------------------------------------------------------ te_mx.formats
def _codes(d: str) -> dict[str, Any]:
    codes, scales = formats.get("mxfp4").quantize(floats(d, 33, K), "even")
    return {"codes": codes, "scales": scales, "k": K, "dtype": torch.float32}


BYTES = (
    NO_TENSOR | META | LAYOUTS | SCALAR | SHARED_ROWS
    | STRIDES.but("negative view", "on the cpu")
    | changed(
        floats=lambda x: x.float(), int32=lambda x: x.int(), bools=lambda x: x.bool(),
        column_less=lambda x: x[:, :-1], row_less=lambda x: x[:-1], a_line=lambda x: x.flatten(),
        dimension_more=lambda x: x[None],
    )
)  # fmt: skip
FP32_SCALES = (
    NO_TENSOR | META | SCALAR | SHARED_ROWS
    | changed(
        halves=lambda x: x.half(), doubles=lambda x: x.double(), int32=lambda x: x.int(),
        column_less=lambda x: x[:, :-1], a_line=lambda x: x.flatten(),
        dimension_more=lambda x: x[None],
    )
)  # fmt: skip


def _blockwise(d: str) -> dict[str, Any]:
    codes, scales = formats.get("fp8_e4m3_128x128").quantize(floats(d, 129, 257), "fp32")
    return {"codes": codes, "scales": scales, "fmt": "fp8_e4m3_128x128",
            "to": "fp8_e4m3fnuz_128x128"}  # fmt: skip


OF_FORMATS = (
    Call(
        "te_mx.formats.get", lambda d: formats.get, lambda d: {"name": "mxfp4"},
        {"name": WORD | UPPER_CASE}, says={"name": "fmt"},
    ),
    Call(
        "te_mx.formats.Format.quantize", lambda d: formats.get("mxfp4").quantize,
        lambda d: {"x": floats(d, 33, K), "rule": "even+sr",
                   "random": random_bits(torch.tensor([3]).to(d), 33, K)},
        {"x": NO_TENSOR | NOT_FLOATS | LAYOUTS | SCALAR | SHARED_ROWS | STRIDES.but("on the cpu")
              | changed(dimension_more=lambda x: x[None], a_line=lambda x: x.flatten()),
         "rule": WORD | UPPER_CASE | values(to_nearest="even"),
         "random": NO_TENSOR | changed(
             None, int64=lambda x: x.long(), a_row_less=lambda x: x[1:],
             a_line=lambda x: x.view(-1), meta=lambda x: x.to("meta"))},
    ),
    Call(
        "te_mx.formats.Format.dequantize", lambda d: formats.get("mxfp4").dequantize, _codes,
        {"codes": BYTES, "scales": BYTES, "k": COUNT | values(one_more=K + 1, another=K - 32),
         "dtype": DTYPE | values(complex64=torch.complex64)},
        says={"codes": "codes", "scales": "scales", "k": "k|codes"},
    ),
    Call(
        "te_mx.formats.convert", lambda d: formats.convert, _blockwise,
        {"codes": BYTES, "scales": FP32_SCALES, "fmt": FORMAT | values(another="mxfp4"),
         "to": FORMAT | values(other_blocks="fp8_e4m3fnuz_1x128", itself="fp8_e4m3_128x128")},
        says={"codes": "codes", "scales": "scales", "fmt": "fmt|conversion",
              "to": "fmt|conversion"},
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ recipes
BLOCK_SCALING = Call(
    "te_mx.recipe.BlockScaling", lambda d: recipe.BlockScaling,
    lambda d: {"x": "mxfp4", "w": "mxfp6_e2m3", "g": "mxfp8_e5m2", "scale_rule": "even",
               "backward_override": None, "precision": "adaptive", "alignment_spread": 8,
               "wgrad_with_hp": False, "one_copy_weights": False, "split_k": False,
               "keep_weight_columns": False},
    {**dict.fromkeys(("x", "w", "g"), FORMAT), "backward_override": OVERRIDE,
     "scale_rule": WORD | UPPER_CASE, "precision": WORD | UPPER_CASE,
     "alignment_spread": COUNT | values(nine=9),
     **dict.fromkeys(FLAGS, FLAG)},
)  # fmt: skip


# ------------------------------------------------------------------------------ MXTensors and GEMMs
def quantized(d: str, fmt: str, *shape: int) -> te_mx.MXTensor:
    return te_mx.quantize(floats(d, *shape), fmt=fmt, columnwise=True)


def _parts(d: str) -> dict[str, Any]:
    q = quantized(d, "mxfp6_e3m2", 33, K)
    return {"shape": (33, K), "fmt": "mxfp6_e3m2", "rowwise_data": q.rowwise_data,
            "rowwise_scale": q.rowwise_scale, "columnwise_data": q.columnwise_data,
            "columnwise_scale": q.columnwise_scale,
            "columnwise_transposed": q.columnwise_transposed}  # fmt: skip


def _scaled_parts(d: str) -> dict[str, Any]:
    q = quantized(d, "nvfp4", 33, K)
    return {"shape": (33, K), "fmt": "nvfp4", "rowwise_data": q.rowwise_data,
            "rowwise_scale": q.rowwise_scale, "tensor_scale": q.tensor_scale}  # fmt: skip


IN_OTHER_FORMATS = (
    Call(
        "te_mx.quantize to mxfp4", lambda d: te_mx.quantize,
        lambda d: {"x": floats(d, 33, K), "fmt": "mxfp4", "rowwise": True, "columnwise": True,
                   "columnwise_transposed": True, "scale_rule": "even"},
        {"x": NO_TENSOR | NOT_FLOATS | LAYOUTS | SCALAR | STRIDES.but("on the cpu") | SHARED_ROWS,
         "fmt": FORMAT, "columnwise_transposed": OPTIONAL_FLAG,
         "scale_rule": OPTIONAL_WORD | UPPER_CASE},
        covers="te_mx.quantize",
    ),
    Call(
        "te_mx.MXTensor of mxfp6", lambda d: te_mx.MXTensor, _parts,
        {"fmt": FORMAT | values(another="mxfp4", mxfp8="e4m3"),
         **dict.fromkeys(("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale"),
                         PARTS)},
        covers="te_mx.MXTensor",
        says={"fmt": "fmt|rowwise_data", "rowwise_data": "rowwise_data|columnwise_data",
              "columnwise_data": "rowwise_data|columnwise_data"},
    ),
    Call(
        "te_mx.MXTensor of nvfp4", lambda d: te_mx.MXTensor, _scaled_parts,
        {"fmt": FORMAT | values(another="mxfp4", mxfp8="e4m3"),
         "tensor_scale": NO_TENSOR | LAYOUTS | changed(
             None, meta=lambda x: x.to("meta"), halves=lambda x: x.half(),
             doubles=lambda x: x.double(), two=lambda x: x.expand(2),
             nothing=lambda x: x.view(1)[:0])},
        covers="te_mx.MXTensor",
        says={"fmt": "fmt|rowwise_data|rowwise_scale"},
    ),
    *(
        Call(
            f"te_mx.gemm of {fmt} and mxfp6", lambda d: te_mx.gemm,
            lambda d, fmt=fmt: {"A": quantized(d, fmt, M, K), "B": quantized(d, "mxfp6_e2m3", N, K),
                                "bias": floats(d, M), "gelu": "tanh",
                                "out": torch.ones(N, M, device=d)},
            {"A": mx("row"), "B": mx("row"), "bias": VECTOR.but("None"), "out": output("A", "B")},
            covers="te_mx.gemm",
        )
        for fmt in ("nvfp4", "mxfp4")
    ),
    Call(
        "te_mx.gemm backward of mxfp4 and mxfp8", lambda d: te_mx.gemm,
        lambda d: {"A": quantized(d, "mxfp4", K, M), "B": quantized(d, "e5m2", N, K),
                   "layout": "NN", "grad": True, "gelu_in": floats(d, N, M), "bias": floats(d, M),
                   "gelu": "erf", "precision": "adaptive"},
        {"A": mx("column"), "B": mx("row"), "layout": GEMM_KINDS["layout"],
         "gelu_in": SHAPED.but("None"), "precision": GEMM_KINDS["precision"]},
        covers="te_mx.gemm", says={"A": "A|gelu_in", "layout": "layout|A|B|gelu_in"},
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------- layers
def forward(family: str) -> Call:
    def make(d: str) -> Any:
        layer = module(family, d)

        def run(**arguments: Any) -> dict[str, Any]:
            with te_mx.autocast(recipe=MIXED):
                return trained(layer, layer, **arguments)

        return run

    return Call(
        f"te_mx.{family}.forward in other formats",
        make,
        lambda d: inputs(family, d),
        {name: FORWARD[name] for name in inputs(family, "cpu")},
        covers=f"te_mx.{family}.forward",
    )


FORMATS = (
    *OF_FORMATS, BLOCK_SCALING, *IN_OTHER_FORMATS, *(forward(family) for family in te_mx.nn.__all__)
)  # fmt: skip
