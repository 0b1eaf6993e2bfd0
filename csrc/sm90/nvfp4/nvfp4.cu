// Rows as they are times NVFP4 weights that stand still: checks, and the instance.
#include <algorithm>

#include "common/formats.h"
#include "common/launch.h"
#include "mxtile/sm90/tensor_map.h"
#include "nvfp4/nvfp4_many.cuh"
#include "te_mx/sm90_split.h"

namespace te_mx::sm90 {
namespace {

Status check(const Nvfp4Args& a) {
  if (a.m < 1 || a.n < 1 || a.k < 1 || a.w == nullptr || a.x == nullptr || a.out == nullptr ||
      a.w_scales == nullptr || a.scale == nullptr)
    return Status::bad_argument;
  if (!known(a.x_dtype) || !known(a.out_dtype) || !known(a.bias_dtype)) return Status::bad_argument;
  if (a.ldx < a.k || a.ldo < a.n || a.execution.kernel > kDecodeMaxCluster)
    return Status::bad_argument;
  constexpr int64_t kMost = (int64_t{1} << 31) - 257;
  if (a.m > kMost || a.n > kMost || a.k > kMost) return Status::unsupported;
  if (a.groups.count < 0 || a.groups.count > kMost || a.groups.capacity != 0)
    return Status::unsupported;
  if (a.groups.count > 0 && (a.groups.rows != a.m || !valid(a.groups))) return Status::bad_argument;
  if (a.activates && (a.act < Act{} || a.act > Act::gelu_erf)) return Status::bad_argument;
  if (a.activates && a.act == Act::clamped_silu) return Status::unsupported;
  const auto whole = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (a.x_dtype == DType::f32 || !whole(a.w) || !whole(a.w_scales) || !whole(a.x) || a.ldx % 8 != 0)
    return Status::unsupported;
  return Status::ok;
}

// CTAs of a cluster: up to 64 rows what the sizes of the weight say, so that the bits of a row do
// not depend on their number.
template <class Math>
int cluster_of(const Nvfp4Args& a) {
  return num_splits(
      {SplitKind::nvfp4, a.n, a.k, current_device().sms, a.groups.count, a.m, Math::kCols});
}

// What both kernels are told, and x.
template <class Math>
bool prepare(const Nvfp4Args& a, Nvfp4Params& p, DecodeRows& rows, CUtensorMap& x) {
  p.w = a.w, p.w_scales = a.w_scales, p.scale = a.scale, p.scale_rows = a.scale_rows,
  p.n = static_cast<int>(a.n);
  p.groups = (p.n + kNvfp4Rows - 1) / kNvfp4Rows;
  p.quads = static_cast<int>((a.k + kNvfp4Quad - 1) / kNvfp4Quad);
  p.out = {a.out, a.ldo, a.out_dtype, a.bias, a.bias_dtype, a.activates, a.act};
  rows.m = static_cast<int>(a.m), rows.most = Math::kCols;
  if (a.groups.count > 0) rows.groups = group_table(a.groups);
  p.blocks = static_cast<int>(decode_blocks(a.m, a.groups.count, Math::kCols));
  p.cluster = std::min(a.execution.kernel > 0 ? a.execution.kernel : cluster_of<Math>(a), p.quads);
  p.parts = shares_of(p.quads, p.cluster);
  const auto type =
      Math::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return mxtile::sm90::tensor_map_2d(x, type, 2, a.x, a.m, a.k, a.ldx * 2, Math::kCols);
}

template <class Math, class Kernel>
Status start(const Nvfp4Args& a, Kernel kernel, int64_t clusters, int bytes, int most,
             const CUtensorMap& x, const Nvfp4Params& p, const DecodeRows& rows) {
  if (clusters * p.cluster > INT32_MAX) return Status::unsupported;
  static thread_local int prepared = -1;  // the device whose limit is raised
  int device = 0;
  cudaGetDevice(&device);
  if (prepared != device) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (error != cudaSuccess) return started(error);
    prepared = device;
  }
  const dim3 grid(static_cast<unsigned>(clusters * p.cluster));
  return launch_early(kernel, {grid, Math::kThreads, a.execution.stream, bytes, p.cluster}, x, p,
                      rows);
}

template <class Math>
Status run(const Nvfp4Args& a) {
  Nvfp4Params p;
  DecodeRows rows;
  CUtensorMap x;
  if (!prepare<Math>(a, p, rows, x)) return Status::unsupported;
  const Nvfp4Room room = Math::room(p.cluster, p.parts.least + (p.parts.longer > 0 ? 1 : 0));
  p.stages = room.stages, p.sums_at = room.sums_at;
  if (p.stages < 1) return Status::unsupported;
  const int64_t clusters = int64_t{tiles_of<Math>(p.groups)} * p.blocks;
  const int bytes = std::max(room.bytes, Math::kLeastSmem);
  return start<Math>(a, &nvfp4_kernel<Math>, clusters, bytes, Math::kSmem, x, p, rows);
}

// The same of many rows.
template <class Math>
Status run_many(const Nvfp4Args& a) {
  Nvfp4Params p;
  DecodeRows rows;
  CUtensorMap x;
  if (!prepare<Math>(a, p, rows, x)) return Status::unsupported;
  // Where 16 bits of out are all there is to write, in whole 16 bytes.
  p.walks = p.cluster == 1 && a.groups.count == 0 && !a.activates && a.out_dtype != DType::f32 &&
            a.ldo % 8 == 0 && a.n % 8 == 0 && reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
  int64_t clusters = int64_t{tiles_of<Math>(p.groups)} * p.blocks;
  if (p.walks) clusters = std::min<int64_t>(clusters, current_device().sms);
  return start<Math>(a, &nvfp4_many<Math>, clusters, Math::kSmem, Math::kSmem, x, p, rows);
}

// Rows that may meet one matrix: of groups twice as many as on average.
int64_t rows_of(const Nvfp4Args& a) {
  const int64_t each =
      a.groups.count <= 1 ? a.m : 2 * ((a.m + a.groups.count - 1) / a.groups.count);
  return std::min(a.m, each);
}

// NOTE: up to 64 rows all in one way, so that a row has the same sums.
Status run_bf16(const Nvfp4Args& a) {
  const int64_t m = rows_of(a);
  if (m <= 8) return run<Nvfp4Math<8, false>>(a);
  if (m <= 16) return run<Nvfp4Math<16, false>>(a);
  if (m <= 32) return run<Nvfp4Math<32, false>>(a);
  const bool thin = a.n <= 3072 && m <= 128;
  if (m <= 64 || thin) return run<Nvfp4Math<64, false>>(a);
  return nvfp4_block(m, a.n, a.k, current_device().sms) == 128 ? run_many<Nvfp4Many<128, false>>(a)
                                                               : run_many<Nvfp4Many<256, false>>(a);
}

Status run_f16(const Nvfp4Args& a) {
  const int64_t m = rows_of(a);
  return m <= 8    ? run<Nvfp4Math<8, true>>(a)
         : m <= 64 ? run<Nvfp4Math<64, true>>(a)
                   : run_many<Nvfp4Many<256, true>>(a);
}

}  // namespace

Status nvfp4_product(const Nvfp4Args& a) {
  const Status status = check(a);
  if (status != Status::ok) return status;
  if (current_device().sms == 0) return Status::unsupported;
  return a.x_dtype == DType::bf16 ? run_bf16(a) : run_f16(a);
}

}  // namespace te_mx::sm90
