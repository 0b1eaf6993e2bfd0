// The module te_mx._sm90: the Hopper backend (te_mx/sm90.h) on records. It links the CUDA runtime
// statically and the driver not at all, so it imports on a machine without one; available() says
// what is there.
#include "te_mx/sm90.h"

#include <pybind11/stl.h>

#include <array>
#include <vector>

#include "common/device.h"
#include "fused/fused_task.h"
#include "record.hpp"
#include "sequence.hpp"
#include "te_mx/sm90_decode.h"
#include "te_mx/sm90_frozen.h"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::bindings {
namespace {

using namespace te_mx::sm90;

int32_t number(Status status) { return static_cast<int32_t>(status); }

const Execution& execution_of(const GroupedQuantizeArgs& args) { return args.all.execution; }
const Execution& execution_of(const GroupedGemmArgs& args) { return args.gemm.execution; }
template <class Args>
const Execution& execution_of(const Args& args) {
  return args.execution;
}

std::vector<const void*> addresses(const std::vector<uintptr_t>& of) {
  std::vector<const void*> all;
  for (const uintptr_t address : of) all.push_back(reinterpret_cast<const void*>(address));
  return all;
}

// A call on the device that its record names.
template <class Args>
void bind_call(py::module_& m, const char* name, Status (*run)(const Args&)) {
  m.def(name, [run](const Args& args) {
    const DeviceScope scope(execution_of(args).device);
    return number(run(args));
  });
}

// The calls that layers are made of, as parts of sequences.
void bind_sequences(py::module_& m) {
  const auto one = [](const char* name, auto run, auto args) {
    using Args = decltype(args);
    using Run = decltype(run);
    struct First {
      Status operator()(const std::array<Args, 1>& all) const { return Run{}(all[0]); }
    };
    sequences::add<Args, 1>(name, First{});
  };
  one("quantize", [](const QuantizeArgs& a) { return quantize(a); }, QuantizeArgs{});
  one("gemm", [](const GemmArgs& a) { return gemm(a); }, GemmArgs{});
  one("normalize", [](const NormArgs& a) { return normalize(a); }, NormArgs{});
  one(
      "normalize_backward", [](const NormGradArgs& a) { return normalize_backward(a); },
      NormGradArgs{});
  one("activate", [](const ActArgs& a) { return activate(a); }, ActArgs{});
  one(
      "nvfp4_quantize", [](const Nvfp4QuantizeArgs& a) { return nvfp4_quantize(a); },
      Nvfp4QuantizeArgs{});
  one("nvfp4_from_rows", [](const Nvfp4Args& a) { return nvfp4_from_rows(a); }, Nvfp4Args{});
  one(
      "nvfp4_multiply", [](const Nvfp4MultiplyArgs& a) { return nvfp4_multiply(a); },
      Nvfp4MultiplyArgs{});
  sequences::add<QuantizeArgs, 2>("quantize_two", [](const std::array<QuantizeArgs, 2>& a) {
    return quantize_two(a[0], a[1]);
  });
  sequences::add<Nvfp4QuantizeArgs, 2>(
      "nvfp4_quantize_two",
      [](const std::array<Nvfp4QuantizeArgs, 2>& a) { return nvfp4_quantize_two(a[0], a[1]); });
  sequences::add_to(m);
}

void bind_device(py::module_& m) {
  m.attr("SCALE_WORDS") = kScaleWords;
  m.attr("MAX_SPREAD") = kMaxSpread;
  m.def(
      "available",
      [](int device) {
        const DeviceScope scope(device);
        return available();
      },
      py::arg("device") = -1);
  m.def("error_text", &error_text);
  m.def("capture_number",
        [](uintptr_t stream) { return capture_number(reinterpret_cast<void*>(stream)); });
  m.def("packed_ld", &packed_ld);
  m.def("packed_scale_words", &packed_scale_words);
  // Bytes of codes and scales in one buffer, and where the scales start.
  m.def("packed_bytes", [](int64_t rows, int64_t k) {
    const OperandOffsets at = operand_offsets(0, rows, k);
    return py::make_tuple(at.end, at.scales);
  });
}

void bind_quantizers(py::module_& m) {
  bind_call(m, "quantize", quantize);
  m.def("quantize_two", [](const QuantizeArgs& first, const QuantizeArgs& second) {
    const DeviceScope scope(first.execution.device);
    return number(quantize_two(first, second));
  });
  // xs, rows: address and rows of each matrix.
  m.def("quantize_joined", [](const QuantizeArgs& args, const std::vector<uintptr_t>& xs,
                              const std::vector<int64_t>& rows) {
    if (xs.size() != rows.size()) return number(Status::bad_argument);
    const std::vector<const void*> from = addresses(xs);
    const DeviceScope scope(args.execution.device);
    return number(
        quantize_joined(args, from.data(), rows.data(), static_cast<int64_t>(from.size())));
  });
  bind_call(m, "pack", pack);
  bind_call(m, "unpack", unpack);
  m.def("unpack_stacked", [](const PackArgs& args, int64_t rows) {
    const DeviceScope scope(args.execution.device);
    return number(unpack_stacked(args, rows));
  });
  m.def("unpack_two", [](const PackArgs& first, const PackArgs& second) {
    const DeviceScope scope(first.execution.device);
    return number(unpack_two(first, second));
  });
  const auto frozen = [&m](const char* name, Status (*run)(const FrozenArgs&)) {
    m.def(name,
          [run](const std::array<uintptr_t, 4>& plain_and_tiles, int64_t rows, int64_t k,
                uintptr_t aside, int64_t room, uintptr_t counts, int device, uintptr_t stream) {
            FrozenArgs args;
            args.codes = reinterpret_cast<uint8_t*>(plain_and_tiles[0]);
            args.scales = reinterpret_cast<uint8_t*>(plain_and_tiles[1]);
            args.tiles = reinterpret_cast<uint8_t*>(plain_and_tiles[2]);
            args.words = reinterpret_cast<uint32_t*>(plain_and_tiles[3]);
            args.rows = rows, args.k = k, args.room = room;
            args.aside = reinterpret_cast<int64_t*>(aside);
            args.counts = reinterpret_cast<unsigned long long*>(counts);
            args.execution.device = device;
            args.execution.stream = reinterpret_cast<void*>(stream);
            const DeviceScope scope(device);
            return number(run(args));
          });
  };
  frozen("pack_frozen", pack_frozen);
  frozen("unpack_frozen", unpack_frozen);
  bind_call(m, "dequantize", dequantize);
  m.def("row_sums_workspace_bytes", &row_sums_workspace_bytes);
  bind_call(m, "row_sums", row_sums);
  m.def("norm_counters", &norm_counters);
  m.def("norm_partial_sums", &norm_partial_sums);
  bind_call(m, "normalize", normalize);
  bind_call(m, "normalize_rows", normalize_rows);
  bind_call(m, "normalize_backward", normalize_backward);
  bind_call(m, "activate", activate);
}

void bind_gemms(py::module_& m) {
  m.def("config_count", &config_count);
  m.def("config_full", &config_full);
  m.def("config_name", &config_name);
  m.def("chosen_config", [](const GemmArgs& args) {
    const DeviceScope scope(args.execution.device);
    return chosen_config(args);
  });
  m.def("workspace_bytes", [](const GemmArgs& args) { return workspace_bytes(args); });
  bind_call(m, "gemm", gemm);
  m.def("codes_workspace_bytes", [](const GemmArgs& args) { return codes_workspace_bytes(args); });
  bind_call(m, "gemm_codes", gemm_codes);
}

void bind_groups(py::module_& m) {
  m.def("group_tiles", &group_tiles);
  m.def("grouped_config_count", &grouped_config_count);
  m.def("grouped_config_name", &grouped_config_name);
  m.def(
      "upload_ends",
      [](const std::vector<int64_t>& ends, uintptr_t to, uintptr_t stream, int device) {
        const DeviceScope scope(device);
        return number(upload_ends(ends.data(), static_cast<int64_t>(ends.size()),
                                  reinterpret_cast<int32_t*>(to), reinterpret_cast<void*>(stream)));
      },
      py::arg("ends"), py::arg("to"), py::arg("stream"), py::arg("device") = -1);
  bind_call(m, "quantize_grouped", quantize_grouped);
  m.def("activate_grouped", [](const ActArgs& args, const Groups& groups) {
    const DeviceScope scope(args.execution.device);
    return number(activate_grouped(args, groups));
  });
  // xs: an address for each matrix.
  m.def("quantize_stacked", [](const QuantizeArgs& args, const std::vector<uintptr_t>& xs) {
    const std::vector<const void*> from = addresses(xs);
    const DeviceScope scope(args.execution.device);
    return number(quantize_stacked(args, from.data(), static_cast<int64_t>(from.size())));
  });
  bind_call(m, "pack_stacked", pack_stacked);
  bind_call(m, "columns_of_stacked", columns_of_stacked);
  // first_rows: where D of every group begins, or nothing.
  m.def(
      "gemm_grouped",
      [](const GroupedGemmArgs& given, const std::vector<int32_t>& first_rows) {
        GroupedGemmArgs args = given;
        if (!first_rows.empty()) {
          if (static_cast<int64_t>(first_rows.size()) != args.groups.count)
            return number(Status::bad_argument);
          args.first_rows = first_rows.data();
        }
        const DeviceScope scope(args.gemm.execution.device);
        return number(gemm_grouped(args));
      },
      py::arg("args"), py::arg("first_rows") = std::vector<int32_t>{});
}

// A call on the device that its record names, as one that can be prepared.
template <class Args, Status (*kRun)(const Args&)>
void bind_prepared(const char* name) {
  prepared::add<Args>(name, [](const Args& args) -> int64_t {
    const DeviceScope scope(execution_of(args).device);
    return -number(kRun(args));
  });
}

void bind_linear(py::module_& m) {
  m.def("linear_offsets", [](const LinearArgs& args) { return as_dict(linear_offsets(args)); });
  bind_call(m, "linear_forward", linear_forward);
  bind_call(m, "linear_backward", linear_backward);
  bind_call(m, "linear_wgrad", linear_wgrad);
  bind_prepared<LinearArgs, linear_forward>("linear_forward");
  bind_prepared<LinearArgs, linear_backward>("linear_backward");
  bind_prepared<LinearArgs, linear_wgrad>("linear_wgrad");
  prepared::add_to(m);
}

void bind_moe(py::module_& m) {
  bind_call(m, "moe_gemm", moe_gemm);
  bind_call(m, "moe_align", moe_align);
  bind_call(m, "moe_combine", moe_combine);
}

void bind_norm_rows(py::module_& m) {
  Record<NormRowsArgs>()
      .part("x", &NormRowsArgs::x, "x_")
      .field("rms", &NormRowsArgs::rms)
      .field("zero_centered", &NormRowsArgs::zero_centered)
      .field("eps", &NormRowsArgs::eps)
      .field("inverse", &NormRowsArgs::inverse)
      .field("weight", &NormRowsArgs::weight)
      .field("bias", &NormRowsArgs::bias)
      .field("weight_dtype", &NormRowsArgs::weight_dtype)
      .field("z", &NormRowsArgs::z)
      .field("z_dtype", &NormRowsArgs::z_dtype)
      .part("execution", &NormRowsArgs::execution, "")
      .add_to(m, "NormRowsArgs");
}

void bind_decode(py::module_& m) {
  Record<DecodeArgs>()
      .field("m", &DecodeArgs::m)
      .field("n", &DecodeArgs::n)
      .field("k", &DecodeArgs::k)
      .field("w", &DecodeArgs::w)
      .field("ldw", &DecodeArgs::ldw)
      .field("w_scales", &DecodeArgs::w_scales)
      .field("spread", &DecodeArgs::spread)
      .field("w_packed", &DecodeArgs::w_packed)
      .field("w_element", &DecodeArgs::w_element)
      .field("factors", &DecodeArgs::factors)
      .field("factor_rows", &DecodeArgs::factor_rows)
      .field("x", &DecodeArgs::x)
      .field("ldx", &DecodeArgs::ldx)
      .field("x_dtype", &DecodeArgs::x_dtype)
      .field("x_as_is", &DecodeArgs::x_as_is)
      .field("x_scales", &DecodeArgs::x_scales)
      .field("x_element", &DecodeArgs::x_element)
      .field("gate", &DecodeArgs::gate)
      .field("ldgate", &DecodeArgs::ldgate)
      .field("x_act", &DecodeArgs::x_act)
      .field("rule", &DecodeArgs::rule)
      .field("amax_epsilon", &DecodeArgs::amax_epsilon)
      .field("exact", &DecodeArgs::exact)
      .field("out", &DecodeArgs::out)
      .field("ldo", &DecodeArgs::ldo)
      .field("out_dtype", &DecodeArgs::out_dtype)
      .field("bias", &DecodeArgs::bias)
      .field("bias_dtype", &DecodeArgs::bias_dtype)
      .part("groups", &DecodeArgs::groups, "groups_")
      .field("activates", &DecodeArgs::activates)
      .field("act", &DecodeArgs::act)
      .part("execution", &DecodeArgs::execution, "")
      .add_to(m, "DecodeArgs");
  m.def("decode_workspace", &decode_workspace);
  bind_call(m, "decode", decode);
}

void bind_nvfp4(py::module_& m) {
  Record<Nvfp4Args>()
      .field("m", &Nvfp4Args::m)
      .field("n", &Nvfp4Args::n)
      .field("k", &Nvfp4Args::k)
      .field("w", &Nvfp4Args::w)
      .field("w_scales", &Nvfp4Args::w_scales)
      .field("scale", &Nvfp4Args::scale)
      .field("scale_rows", &Nvfp4Args::scale_rows)
      .field("square", &Nvfp4Args::square)
      .field("k_first", &Nvfp4Args::k_first)
      .field("x", &Nvfp4Args::x)
      .field("ldx", &Nvfp4Args::ldx)
      .field("x_dtype", &Nvfp4Args::x_dtype)
      .field("mx", &Nvfp4Args::mx)
      .field("quantizes", &Nvfp4Args::quantizes)
      .field("x_element", &Nvfp4Args::x_element)
      .field("rule", &Nvfp4Args::rule)
      .field("gate", &Nvfp4Args::gate)
      .field("ldgate", &Nvfp4Args::ldgate)
      .field("x_act", &Nvfp4Args::x_act)
      .field("places", &Nvfp4Args::places)
      .field("x_rows", &Nvfp4Args::x_rows)
      .field("experts", &Nvfp4Args::experts)
      .field("each", &Nvfp4Args::each)
      .field("stands", &Nvfp4Args::stands)
      .field("out", &Nvfp4Args::out)
      .field("ldo", &Nvfp4Args::ldo)
      .field("out_dtype", &Nvfp4Args::out_dtype)
      .field("bias", &Nvfp4Args::bias)
      .field("bias_dtype", &Nvfp4Args::bias_dtype)
      .part("groups", &Nvfp4Args::groups, "groups_")
      .field("activates", &Nvfp4Args::activates)
      .field("act", &Nvfp4Args::act)
      .part("execution", &Nvfp4Args::execution, "")
      .add_to(m, "Nvfp4Args");
  bind_call(m, "nvfp4_product", nvfp4_product);
  m.def("nvfp4_workspace", &nvfp4_workspace);
  bind_call(m, "nvfp4_to_values", nvfp4_to_values);
  bind_call(m, "nvfp4_from_rows", nvfp4_from_rows);
  Record<Nvfp4FinishArgs>()
      .field("m", &Nvfp4FinishArgs::m)
      .field("n", &Nvfp4FinishArgs::n)
      .field("sums", &Nvfp4FinishArgs::sums)
      .field("of_lhs", &Nvfp4FinishArgs::of_lhs)
      .field("of_rhs", &Nvfp4FinishArgs::of_rhs)
      .field("lhs_rows", &Nvfp4FinishArgs::lhs_rows)
      .field("rhs_rows", &Nvfp4FinishArgs::rhs_rows)
      .field("bias", &Nvfp4FinishArgs::bias)
      .field("bias_dtype", &Nvfp4FinishArgs::bias_dtype)
      .field("out", &Nvfp4FinishArgs::out)
      .field("out_dtype", &Nvfp4FinishArgs::out_dtype)
      .field("accumulate", &Nvfp4FinishArgs::accumulate)
      .part("execution", &Nvfp4FinishArgs::execution, "")
      .add_to(m, "Nvfp4FinishArgs");
  bind_call(m, "nvfp4_finish", nvfp4_finish);
  Record<Nvfp4MultiplyArgs>()
      .field("m", &Nvfp4MultiplyArgs::m)
      .field("n", &Nvfp4MultiplyArgs::n)
      .field("k", &Nvfp4MultiplyArgs::k)
      .field("lhs", &Nvfp4MultiplyArgs::lhs)
      .field("rhs", &Nvfp4MultiplyArgs::rhs)
      .field("lhs_k_first", &Nvfp4MultiplyArgs::lhs_k_first)
      .field("rhs_k_first", &Nvfp4MultiplyArgs::rhs_k_first)
      .field("of_lhs", &Nvfp4MultiplyArgs::of_lhs)
      .field("of_rhs", &Nvfp4MultiplyArgs::of_rhs)
      .field("factors", &Nvfp4MultiplyArgs::factors)
      .field("bias", &Nvfp4MultiplyArgs::bias)
      .field("bias_dtype", &Nvfp4MultiplyArgs::bias_dtype)
      .field("out", &Nvfp4MultiplyArgs::out)
      .field("ldo", &Nvfp4MultiplyArgs::ldo)
      .field("out_dtype", &Nvfp4MultiplyArgs::out_dtype)
      .field("accumulate", &Nvfp4MultiplyArgs::accumulate)
      .part("execution", &Nvfp4MultiplyArgs::execution, "")
      .add_to(m, "Nvfp4MultiplyArgs");
  m.def("nvfp4_multiply_workspace", &nvfp4_multiply_workspace);
  bind_call(m, "nvfp4_multiplies", nvfp4_multiplies);
  bind_call(m, "nvfp4_multiply", nvfp4_multiply);
  Record<Nvfp4Side>()
      .field("codes", &Nvfp4Side::codes)
      .field("scales", &Nvfp4Side::scales)
      .field("k_first", &Nvfp4Side::k_first)
      .field("scale", &Nvfp4Side::scale)
      .field("scale_rows", &Nvfp4Side::scale_rows)
      .field("transforms", &Nvfp4Side::transforms)
      .field("by_32", &Nvfp4Side::by_32)
      .field("signs", &Nvfp4Side::signs)
      .field("factors", &Nvfp4Side::factors)
      .field("times", &Nvfp4Side::times)
      .add_to(m, "Nvfp4Side");
  Record<Nvfp4QuantizeArgs>()
      .part("x", &Nvfp4QuantizeArgs::x, "x_")
      .part("row", &Nvfp4QuantizeArgs::row, "row_")
      .part("col", &Nvfp4QuantizeArgs::col, "col_")
      .field("square", &Nvfp4QuantizeArgs::square)
      .field("seed", &Nvfp4QuantizeArgs::seed)
      .field("first", &Nvfp4QuantizeArgs::first)
      .field("tries", &Nvfp4QuantizeArgs::tries)
      .field("narrow", &Nvfp4QuantizeArgs::narrow)
      .field("amax", &Nvfp4QuantizeArgs::amax)
      .part("groups", &Nvfp4QuantizeArgs::groups, "groups_")
      .part("execution", &Nvfp4QuantizeArgs::execution, "")
      .add_to(m, "Nvfp4QuantizeArgs");
  bind_call(m, "nvfp4_quantize", nvfp4_quantize);
  m.def("nvfp4_quantize_two", [](const Nvfp4QuantizeArgs& first, const Nvfp4QuantizeArgs& second) {
    const DeviceScope scope(first.execution.device);
    return number(nvfp4_quantize_two(first, second));
  });
  m.def("nvfp4_quantize_stacked", [](const Nvfp4QuantizeArgs& args,
                                     const std::vector<uintptr_t>& xs) {
    const std::vector<const void*> from = addresses(xs);
    const DeviceScope scope(args.execution.device);
    return number(nvfp4_quantize_stacked(args, from.data(), static_cast<int64_t>(from.size())));
  });
}

}  // namespace
}  // namespace te_mx::bindings

PYBIND11_MODULE(_sm90, m) {
  using namespace te_mx::bindings;
  m.doc() = "Native Hopper kernels of te_mx: addresses and sizes in, unchecked; a status out.";
  bind_common(m);
  m.attr("NVCC") = TE_MX_NVCC;  // its version
  bind_device(m);
  bind_quantizers(m);
  bind_gemms(m);
  bind_groups(m);
  bind_linear(m);
  bind_sequences(m);
  bind_norm_rows(m);
  bind_decode(m);
  bind_nvfp4(m);
  bind_moe(m);
}
