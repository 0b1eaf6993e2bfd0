"""What other libraries make of the inputs of the conformance set, where they are installed."""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx import formats
from te_mx.conformance import cases
from te_mx.conformance.cases import Difference, difference

_BYTE = torch.uint8
Call = Callable[[Tensor], tuple[Tensor, ...]]  # x to codes, scales, perhaps the tensor scale


class Way(NamedTuple):
    """A quantizer of another library, and the format and rule that should have its bytes."""

    fmt: str
    rule: str
    call: Call


class Compared(NamedTuple):
    """What a library made of an input: how it differs from a rule of te_mx, or why it made nothing;
    None where the bytes are the same."""

    library: str
    fmt: str
    rule: str
    dtype: str
    given: str
    why: Difference | str | None


def compare(device: torch.device) -> Iterator[Compared]:
    """Every installed library on every input, against the rule that stands for it; NVFP4's, which
    four libraries write in four ways, against all of them."""
    for library, ways in _LIBRARIES.items():
        if version(library) is None:
            continue
        try:
            found = list(ways(device))
        except Exception as error:  # another library may fail in any way when it is imported
            yield Compared(library, "", "", "", "", _said(error))
            continue
        for way in found:
            fmt = formats.get(way.fmt)
            rules = fmt.scaling.rules if fmt.tensor_scaled else (way.rule,)
            for dtype in cases.DTYPES:
                for given in cases.INPUTS:
                    yield from _on(library, way, rules, dtype, given, device)


def version(library: str) -> str | None:
    """Its version, None where it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


LIBRARIES = ("torchao", "compressed-tensors", "nvidia-modelopt", "transformer-engine")


def _on(
    library: str, way: Way, rules: tuple[str, ...], dtype: str, given: str, device: torch.device
) -> Iterator[Compared]:  # fmt: skip
    fmt, x = formats.get(way.fmt), cases.make(given, dtype)
    # Whole blocks, which most libraries ask for; and what is finite, as few say what else becomes.
    x = x[: len(x) // 16 * 16, : x.shape[1] // 32 * 32]
    x = torch.where(x.isfinite(), x, 0).contiguous()
    try:
        theirs = way.call(x.to(device))
    except Exception as error:
        yield Compared(library, way.fmt, way.rule, dtype, given, _said(error))
        return
    for rule in rules:
        ours = fmt.quantize(x, rule)
        why = difference(fmt, ours, theirs)
        yield Compared(library, way.fmt, rule, dtype, given, why)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


# ------------------------------------------------------------------------------------ the libraries
def _torchao(device: torch.device) -> Iterator[Way]:
    mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    nv = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    elements = {
        "mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6_e2m3": "fp6_e2m3", "mxfp6_e3m2": "fp6_e3m2", "mxfp4": torch.float4_e2m1fn_x2,
    }  # fmt: skip

    def of_mx(fmt: str, element: Any, mode: Any) -> Call:
        def call(x: Tensor) -> "tuple[Tensor, ...]":
            scales, codes = mx.to_mx(x, element, 32, mode)
            codes = codes.view(_BYTE)
            packed = codes if fmt[:5] != "mxfp6" else formats.get(fmt).pack(codes)
            return packed, scales.view(_BYTE)

        return call

    for fmt, element in elements.items():
        for rule in formats.get(fmt).scaling.rules:
            yield Way(fmt, rule, of_mx(fmt, element, mx.ScaleCalculationMode(rule)))

    def nvfp4(x: Tensor) -> "tuple[Tensor, ...]":
        whole = nv.per_tensor_amax_to_scale(x.abs().amax())
        scales, codes = nv.nvfp4_quantize(x, 16, whole)
        return codes, scales.view(_BYTE), whole

    yield Way("nvfp4", "torchao", nvfp4)


def _compressed_tensors(device: torch.device) -> Iterator[Way]:
    quantization = importlib.import_module("compressed_tensors.quantization")
    utils = importlib.import_module("compressed_tensors.quantization.utils.helpers")
    base = importlib.import_module("compressed_tensors.compressors")

    def of(preset: str, compressor: Any, block: int, scaled: bool) -> Call:
        scheme = quantization.preset_name_to_scheme(preset, ["Linear"])

        def call(x: Tensor) -> "tuple[Tensor, ...]":
            held = {"weight": x}
            if scaled:
                held["weight_global_scale"] = utils.generate_gparam(x.amin(), x.amax())
            blocks = x.unflatten(1, (-1, block))
            held["weight_scale"], _ = utils.calculate_qparams(
                blocks.amin(-1), blocks.amax(-1), scheme.weights, held.get("weight_global_scale")
            )
            made = compressor.compress(held, scheme)
            codes = made["weight_packed"] if "weight_packed" in made else made["weight"]
            whole = (held["weight_global_scale"].reciprocal().reshape(()),) if scaled else ()
            return codes.view(_BYTE), made["weight_scale"].view(_BYTE), *whole

        return call

    yield Way("mxfp4", "even", of("MXFP4A16", base.MXFP4PackedCompressor, 32, False))
    yield Way("mxfp8_e4m3", "even", of("MXFP8A16", base.MXFP8QuantizationCompressor, 32, False))
    nvfp4 = of("NVFP4A16", base.NVFP4PackedCompressor, 16, True)
    yield Way("nvfp4", "compressed_tensors", nvfp4)


def _modelopt(device: torch.device) -> Iterator[Way]:
    q = importlib.import_module("modelopt.torch.quantization.qtensor")

    def mxfp8(x: Tensor) -> "tuple[Tensor, ...]":
        held, scales = q.MXFP8QTensor.quantize(x)
        return held._quantized_data.view(_BYTE), scales

    def mxfp4(x: Tensor) -> "tuple[Tensor, ...]":
        held, scales = q.MXFP4QTensor.quantize(x, 32)
        return held._quantized_data, scales.view(len(x), -1)

    def nvfp4(x: Tensor) -> "tuple[Tensor, ...]":
        held, scales, whole = q.NVFP4QTensor.quantize(x, 16)
        return held._quantized_data, scales.view(_BYTE), whole.reshape(())

    yield Way("mxfp8_e4m3", "rceil", mxfp8)
    yield Way("mxfp4", "rceil", mxfp4)
    yield Way("nvfp4", "modelopt", nvfp4)


def _transformer_engine(device: torch.device) -> Iterator[Way]:
    """Written after its source: most of its quantizers want newer GPUs."""
    if device.type != "cuda":
        raise RuntimeError("its quantizers run on a GPU alone: --device cuda")
    te = importlib.import_module("transformer_engine.pytorch")
    types = importlib.import_module("transformer_engine_torch").DType

    def of(quantizer: Any, block: int, scaled: bool) -> Call:
        def call(x: Tensor) -> "tuple[Tensor, ...]":
            made = quantizer(x)
            rows, blocks = len(x), x.shape[1] // block
            scales = made._rowwise_scale_inv.view(_BYTE)[:rows, :blocks]
            if not scaled:
                return made._rowwise_data.view(_BYTE), scales
            encode = torch.full_like(made._amax_rowwise, 2688.0) / made._amax_rowwise
            return made._rowwise_data.view(_BYTE), scales, encode.reciprocal().reshape(())

        return call

    for fmt, word in (("mxfp8_e4m3", "kFloat8E4M3"), ("mxfp8_e5m2", "kFloat8E5M2")):
        made = te.MXFP8Quantizer(getattr(types, word), rowwise=True, columnwise=False)
        yield Way(fmt, "rceil", of(made, 32, False))
    nvfp4 = te.NVFP4Quantizer(types.kFloat4E2M1, rowwise=True, columnwise=False)
    yield Way("nvfp4", "te", of(nvfp4, 16, True))


_LIBRARIES: dict[str, Callable[[torch.device], Iterator[Way]]] = dict(
    zip(LIBRARIES, (_torchao, _compressed_tensors, _modelopt, _transformer_engine), strict=True)
)
