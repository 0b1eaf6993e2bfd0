// The words of the native interface: numbers, scales, layouts, operands, and where a call runs.
//
// Every device takes the same plain structs (quantize.h, gemm.h, fused.h, linear.h) and declares
// its own functions over them (cpu.h, sm90.h). Pointers, sizes and strides in, a Status out:
// nothing here throws, allocates or knows torch. Sizes count elements unless a name says bytes.
// Whatever no kernel of a device takes is Status::unsupported; what cannot be meant is
// Status::bad_argument.
#pragma once

#include <cstdint>

#include "mxtile/mx/element.hpp"

namespace te_mx {

enum class Status : int32_t {
  ok = 0,
  bad_argument = 1,
  unsupported = 2,
  small_workspace = 3,
  launch_failed = 4,  // of a GPU: the runtime refused, as it would refuse anybody now
};

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// What a code is: mxtile has the table.
using mxtile::mx::Element;
using mxtile::mx::kElements;

// What a scale is, and the block of elements that share one.
enum class ScaleType : int32_t { e8m0 = 0, f32 = 1, e4m3 = 2 };
inline constexpr int32_t kScaleTypes = 3;
struct Scaling {
  ScaleType type = ScaleType::e8m0;
  int32_t block_rows = 1, block_k = 32;
};
inline constexpr int64_t kBlock = 32;       // of MX: 1 x 32, E8M0
inline constexpr int64_t kWideBlock = 128;  // of blockwise FP8: 1 x 128 or 128 x 128, fp32
inline constexpr int64_t kSmallBlock = 16;  // of NVFP4: 1 x 16 or 16 x 16, E4M3

// How a scale follows from the largest magnitude of its block: E8M0 by the first three, of which
// kernels exist for two; fp32 by the next two, a power of two or not; E4M3 and the tensor scale by
// the libraries that write them.
enum class ScaleRule : int32_t {
  rceil = 0,
  floor = 1,
  even = 2,
  fp32 = 3,
  pow2 = 4,
  te = 5,
  torchao = 6,
  modelopt = 7,
  compressed_tensors = 8,
  te_4over6 = 9,  // two scales are tried: up to 256 or 448, by magnitudes or squares of errors
  te_4over6_448 = 10,
  te_4over6_mse = 11,
  te_4over6_mse_448 = 12,
};
inline constexpr int32_t kScaleRules = 13;

// How the bytes of an operand [rows, k] lie.
enum class Layout : int32_t {
  k_last = 0,      // codes [rows, k], scales [rows, ceil(k/32)]; compact. Codes of 4 bits lie two
                   // a byte, the first in its low bits: [rows, ceil(k/2)]
  k_first = 1,     // codes [k, rows], one a byte, scales [ceil(k/32), rows]; compact
  tiles = 2,       // packed for Hopper: sm90_layout.h
  group_rows = 3,  // the same of groups of rows,
  group_k = 4,     // and of groups of k
  // Of blocks of 1 x 128 whose scales are powers of two: the tiles of MX, which align them.
  aligned_tiles = 5,
  aligned_group_k = 6,
  standing = 7,  // of 4 bits, for Hopper: sm90_nvfp4.h; of 8, tiles that nobody writes any more
};
inline constexpr int32_t kLayouts = 8;

enum class Gelu : int32_t { none = 0, tanh = 1, erf = 2 };
enum class Role : int32_t { lhs = 0, rhs = 1 };

// What the bias gradient sums: lhs over K (one value a row of lhs), or D over M (one value a column
// of D).
enum class BiasGrad : int32_t { none = 0, operand = 1, result = 2 };

// Of NVFP4: for what each fp32 tensor scale is.
enum class TensorScale : int32_t { all = 0, rows = 1, groups = 2 };

// Numbers to read: element (r, c) is data[r * row_stride + c * col_stride].
struct Matrix {
  const void* data = nullptr;
  int64_t rows = 0, cols = 0;
  int64_t row_stride = 0, col_stride = 1;
  DType dtype = DType::f32;
};

// One side of a GEMM: a logical [rows, k] matrix of codes with their scales.
struct Operand {
  const uint8_t* codes = nullptr;
  const void* scales = nullptr;
  int64_t rows = 0, k = 0;
  Element element = Element::e4m3;
  Layout layout = Layout::k_last;
  Scaling scaling;
  // What the device's pack() made of it for the same kernel and role, or null; bytes from one
  // matrix of a stack to the next.
  const void* packed = nullptr;
  int64_t packed_stride = 0;
  // Of NVFP4: codes times scales are multiplied by these, of which all operands of a stack have
  // some.
  const float* tensor_scale = nullptr;
  TensorScale tensor_scales = TensorScale::all;
};

// Groups of rows, or of k: the tokens of the experts of a mixture. Group i owns [start_i, end_i),
// in order and disjoint, any of them empty; there may be rows between groups and behind the last. A
// group starts at starts[i], without starts where the one before ends, or with a capacity at
// i * capacity. Arrays lie in memory of the device that reads them.
struct Groups {
  int64_t count = 0, rows = 0;  // rows of all: of the matrix
  const int64_t* starts = nullptr;
  const void* ends = nullptr;  // [count], int64 or
  bool ends_int32 = false;
  int64_t capacity = 0;
};

// Where and how a call runs. A device reads what it knows.
struct Execution {
  int32_t threads = 1;     // of a CPU
  int32_t device = -1;     // index of a GPU; -1: the current one
  void* stream = nullptr;  // of a GPU
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  int32_t kernel = -1;  // a kernel or configuration of the device; -1: it chooses, where it can
  int32_t few_rows_kernel = -1;  // that of groups with few rows; -1: as the others
  int32_t parts = 1;             // of K, added up in order; 0 or 1: K in one piece
  bool invariant = false;        // of a CPU: the bits of a row of D depend on no other row of lhs
};

constexpr bool known(Element v) { return v >= Element{} && static_cast<int32_t>(v) < kElements; }
constexpr bool known(DType v) { return v >= DType::f32 && v <= DType::f16; }
constexpr bool known(ScaleRule v) {
  return v >= ScaleRule{} && static_cast<int32_t>(v) < kScaleRules;
}

// What the kernels of today quantize to and multiply; those of CPUs is_fp4() too.
constexpr bool is_fp8(Element v) { return v == Element::e4m3 || v == Element::e5m2; }
constexpr bool is_fp4(Element v) { return v == Element::e2m1; }
constexpr bool is_mx(const Scaling& s) {
  return s.type == ScaleType::e8m0 && s.block_rows == 1 && s.block_k == kBlock;
}
constexpr bool is_power_rule(ScaleRule v) { return v == ScaleRule::rceil || v == ScaleRule::floor; }
constexpr bool is_fnuz(Element v) { return v == Element::e4m3fnuz || v == Element::e5m2fnuz; }
constexpr bool is_blockwise(const Scaling& s) {
  return s.type == ScaleType::f32 && s.block_k == kWideBlock &&
         (s.block_rows == 1 || s.block_rows == kWideBlock);
}
constexpr bool is_nvfp4(const Scaling& s) {
  return s.type == ScaleType::e4m3 && s.block_k == kSmallBlock &&
         (s.block_rows == 1 || s.block_rows == kSmallBlock);
}
constexpr bool is_writer(ScaleRule v) { return v >= ScaleRule::te && known(v); }
constexpr bool is_f32_rule(ScaleRule v) { return v == ScaleRule::fp32 || v == ScaleRule::pow2; }

// ok, or what is wrong with a format that a kernel of today is asked for.
constexpr Status check_format(Element element, const Scaling& scaling) {
  if (!known(element) || scaling.block_rows < 1 || scaling.block_k < 1) return Status::bad_argument;
  return is_fp8(element) && is_mx(scaling) ? Status::ok : Status::unsupported;
}
constexpr Status check_format(Element element, const Scaling& scaling, ScaleRule rule) {
  if (!known(rule)) return Status::bad_argument;
  const Status status = check_format(element, scaling);
  return status == Status::ok && !is_power_rule(rule) ? Status::unsupported : status;
}

}  // namespace te_mx
