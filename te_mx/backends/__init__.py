"""Backends: a folder a device, a file a kernel or two. Importing this package registers them all,
in every process, whatever the machine: whether a kernel runs is what its envelope says."""

from importlib import import_module

from te_mx.backends.cpu.binding import ISA_LEVELS, isa, missing_reason
from te_mx.dispatch.problem import register_level

register_level("cpu", isa, ISA_LEVELS, missing_reason)
for _name in (
    "cpu.cost", "cpu.frozen", "cpu.gemm", "cpu.grouped",
    "cpu.linear", "cpu.quantize", "device_names", "reference.fused", "reference.gemm",
    "reference.grouped", "reference.quantize", "sm90.blockwise", "sm90.codes",
    "sm90.cost", "sm90.decode", "sm90.experts", "sm90.experts_mxfp4", "sm90.fused", "sm90.gemm",
    "sm90.grouped", "sm90.layer", "sm90.linear", "sm90.moe", "sm90.nvfp4",
    "sm90.nvfp4_grouped", "sm90.quantize",
    "sm90.rest", "triton.gemm", "triton.quantize", "vendor.gemm",
):  # fmt: skip
    import_module(f"te_mx.backends.{_name}")
