// Rows times NVFP4 or MXFP4 weights that stand still: checks, and the instance.
#include <algorithm>
#include <iterator>

#include "common/formats.h"
#include "common/launch.h"
#include "mxtile/sm90/tensor_map.h"
#include "nvfp4/nvfp4_many.cuh"
#include "te_mx/sm90_split.h"

namespace te_mx::sm90 {
namespace {

constexpr int kShapes = static_cast<int>(std::size(kNvfp4Shapes));

Status check(const Nvfp4Args& a) {
  if (a.m < 1 || a.n < 1 || a.k < 1 || a.w == nullptr || a.x == nullptr || a.out == nullptr ||
      a.w_scales == nullptr || (a.scale == nullptr && !a.mx))
    return Status::bad_argument;
  if (!known(a.x_dtype) || !known(a.out_dtype) || !known(a.bias_dtype)) return Status::bad_argument;
  if (a.ldx < a.k || a.ldo < a.n || a.execution.kernel >= 16 * (kShapes + 1))
    return Status::bad_argument;
  constexpr int64_t kMost = (int64_t{1} << 31) - 257;
  if (a.m > kMost || a.n > kMost || a.k > kMost) return Status::unsupported;
  if (a.groups.count < 0 || a.groups.count > kMost || a.groups.capacity != 0)
    return Status::unsupported;
  if (a.experts != nullptr) {
    if (a.groups.count < 1 || a.each < 1 || a.each > kMost) return Status::bad_argument;
  } else if (a.each != 1 || (a.groups.count > 0 && (a.groups.rows != a.m || !valid(a.groups)))) {
    return Status::bad_argument;
  }
  if (a.activates && (a.act < Act{} || a.act > Act::gelu_erf)) return Status::bad_argument;
  if (a.activates && a.act == Act::clamped_silu) return Status::unsupported;
  const auto whole = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (!whole(a.w) || !whole(a.w_scales)) return Status::unsupported;
  if (a.quantizes) {
    if (!known(a.x_element) || !known(a.rule)) return Status::bad_argument;
    if (a.places != nullptr && (a.x_rows < 1 || a.x_rows > kMost)) return Status::bad_argument;
    if (!is_fp8(a.x_element) || is_f32_rule(a.rule) || a.execution.kernel > 0)
      return Status::unsupported;
    if (a.gate != nullptr && (a.x_dtype == DType::f32 || a.k % 8 != 0)) return Status::unsupported;
    if (a.execution.workspace_bytes < nvfp4_workspace(a.m, a.k)) return Status::small_workspace;
    return Status::ok;
  }
  if (a.gate != nullptr || a.places != nullptr || a.x_dtype == DType::f32 || !whole(a.x) ||
      a.ldx % 8 != 0)
    return Status::unsupported;
  return a.mx && a.x_dtype == DType::f16 ? Status::unsupported : Status::ok;
}

// x of a call that quantizes; false for a gate that no kernel knows.
bool set_input(DecodeInput& in, const Nvfp4Args& a) {
  const int64_t bytes = a.x_dtype == DType::f32 ? 4 : 2;
  const auto lies = [&](const void* from, int64_t ld) {
    return reinterpret_cast<uintptr_t>(from) % 16 == 0 && ld * bytes % 16 == 0;
  };
  in.x = a.x, in.ld = a.ldx, in.dtype = a.x_dtype, in.e5m2 = a.x_element == Element::e5m2;
  in.vectors = lies(a.x, a.ldx) && (a.gate == nullptr || lies(a.gate, a.ldgate));
  set_rule(in, a.rule, 0.0f);
  return set_gate(in, a.gate, a.ldgate, a.x_act) && (a.gate == nullptr || in.vectors);
}

// Grid: x = quads, y = 16 rows.
__global__ void __launch_bounds__(kInputThreads, 4)
    nvfp4_input(const __grid_constant__ Nvfp4Input a) {
  tile::let_dependents_start();
  tile::await_predecessors();
  if (a.in.e5m2) return write_rows<Element::e5m2>(a);
  write_rows<Element::e4m3>(a);
}

// Writes the values of its codes to the workspace, which then is x.
Status prepare(Nvfp4Args& a) {
  Nvfp4Input p;
  if (!set_input(p.in, a)) return Status::unsupported;
  p.places = {a.places, static_cast<int>(a.x_rows) - 1, static_cast<int>(a.each)};
  p.m = static_cast<int>(a.m), p.k = static_cast<int>(a.k);
  p.to = static_cast<uint16_t*>(a.execution.workspace), p.ld = (a.k + 7) / 8 * 8;
  const int64_t blocks = (a.m + kInputRows - 1) / kInputRows;
  if (blocks > 65535) return Status::unsupported;
  const dim3 grid(static_cast<unsigned>((a.k + kNvfp4Quad - 1) / kNvfp4Quad),
                  static_cast<unsigned>(blocks));
  a.x = p.to, a.ldx = p.ld, a.x_dtype = DType::bf16, a.places = nullptr, a.each = 1;
  return launch_early(nvfp4_input, {grid, kInputThreads, a.execution.stream}, p);
}

// Of the parts of k, the CTAs of a cluster: up to 64 rows what the sizes of the weight say, so that
// the bits of a row do not depend on their number. block: rows of
// x, tile: of weights.
SplitProblem problem_of(const Nvfp4Args& a, int64_t block, int64_t tile) {
  return {SplitKind::nvfp4, a.n, a.k, current_device().sms, a.groups.count, a.m, block, tile};
}

// What both kernels are told, and x.
template <class Math>
bool tell(const Nvfp4Args& a, Nvfp4Params& p, DecodeRows& rows, mxtile::sm90::TensorMaps& x) {
  p.w = a.w, p.w_scales = a.w_scales, p.scale = a.scale, p.scale_rows = a.scale_rows, p.mx = a.mx;
  p.n = static_cast<int>(a.n);
  p.k = static_cast<int>(a.k);
  p.groups = (p.n + kNvfp4Rows - 1) / kNvfp4Rows;
  p.quads = static_cast<int>((a.k + kNvfp4Quad - 1) / kNvfp4Quad);
  p.out = {a.out, a.ldo, a.out_dtype, a.bias, a.bias_dtype, a.activates, a.act};
  rows.m = static_cast<int>(a.m), rows.most = Math::kCols;
  if (a.experts != nullptr) {
    p.experts = a.experts, p.matrices = static_cast<int>(a.groups.count), p.stands = a.stands;
    p.blocks = rows.m;
  } else {
    if (a.groups.count > 0) rows.groups = group_table(a.groups);
    p.blocks = static_cast<int>(decode_blocks(a.m, a.groups.count, Math::kCols));
  }
  const int asked = a.execution.kernel > 0 ? a.execution.kernel % 16 : 0;
  p.cluster = asked > 0 ? std::min(asked, kDecodeMaxCluster)
                        : num_splits(problem_of(a, Math::kCols, Math::kGroups * kNvfp4Rows));
  p.cluster = std::min(p.cluster, p.quads);
  p.cluster_factor = quotient_factor(p.cluster);
  p.parts = shares_of(p.quads, p.cluster);
  p.places = {a.places, static_cast<int>(a.x_rows) - 1, static_cast<int>(a.each)};
  if constexpr (Math::kMakes) {
    return set_input(p.in, a) && p.in.plain(a.k);
  }
  const auto type =
      Math::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const int64_t x_rows = (a.m + a.each - 1) / a.each;
  const bool alone = a.experts != nullptr;  // each row meets weights of its own
  p.x_box = alone ? 1 : static_cast<int>(std::min<int64_t>(Math::kCols, x_rows));
  p.x_rows = alone || a.groups.count > 0 ? INT32_MAX : static_cast<int>(x_rows);
  return mxtile::sm90::tensor_maps_2d(x, type, 2, a.x, x_rows, a.k, a.ldx * 2, p.x_box);
}

template <class Math, class Kernel>
Status start(const Nvfp4Args& a, Kernel kernel, int64_t clusters, int bytes,
             const mxtile::sm90::TensorMaps& x, const Nvfp4Params& p, const DecodeRows& rows) {
  if (clusters * p.cluster > INT32_MAX) return Status::unsupported;
  const dim3 grid(static_cast<unsigned>(clusters * p.cluster));
  return launch_early(kernel, {grid, Math::kThreads, a.execution.stream, bytes, p.cluster}, x.whole,
                      x.end, p, rows);
}

// CTAs of a product of few rows without groups.
int64_t ctas_of(const Nvfp4Args& a, int cluster) {
  return (a.n + kNvfp4Rows - 1) / kNvfp4Rows * cluster;
}

// How many of them share an SM. Groups take many turns of all CTAs, and a third one on an SM fills
// what two of them wait for. So do more of one product than two an SM, of which four may leave less
// of the last turn idle (NVIDIA H200, eleven sizes, 1 to 16 rows).
template <class Math>
int on_sm(const Nvfp4Args& a, int cluster) {
  if (Math::kCols > 16 || Math::kHalf || Math::kMakes) return 2;
  if (a.groups.count > 0) return 3;
  const int64_t sms = current_device().sms, ctas = ctas_of(a, cluster);
  if (ctas <= 2 * sms) return 2;
  if (Math::kCols > 8) return 3;
  const auto slots = [&](int64_t on) { return (ctas + on * sms - 1) / (on * sms) * on; };
  return slots(4) <= std::min(slots(2), slots(3)) ? 4 : slots(3) <= slots(2) ? 3 : 2;
}

template <class Math>
Status run(const Nvfp4Args& a) {
  Nvfp4Params p;
  DecodeRows rows;
  mxtile::sm90::TensorMaps x{};
  if (!tell<Math>(a, p, rows, x)) return Status::unsupported;
  const int on = on_sm<Math>(a, p.cluster);
  const Nvfp4Room room =
      Math::room(p.cluster, p.parts.least + (p.parts.longer > 0 ? 1 : 0), Math::smem(on));
  p.stages = room.stages, p.weights_at = room.weights_at, p.sums_at = room.sums_at;
  if (p.stages < 1) return Status::unsupported;
  const int64_t clusters = int64_t{tiles_of<Math>(p.groups)} * p.blocks;
  const int bytes = std::max(room.bytes, Math::least_smem(on));
  return start<Math>(a, &nvfp4_kernel<Math>, clusters, bytes, x, p, rows);
}

// The same of many rows. What is left where CTAs walk over as many tiles each is a launch of its
// own, with k in parts.
template <class Math>
Status run_many(const Nvfp4Args& a) {
  Nvfp4Params p;
  DecodeRows rows;
  mxtile::sm90::TensorMaps x{};
  if (!tell<Math>(a, p, rows, x)) return Status::unsupported;
  // Where 16 bits of out are all there is to write, in whole 16 bytes.
  p.lines = !a.activates && a.out_dtype != DType::f32 && a.ldo % 8 == 0 && a.n % 8 == 0 &&
            reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
  p.walks = p.lines && p.cluster == 1 && a.groups.count == 0;
  const int64_t tiles = int64_t{tiles_of<Math>(p.groups)} * p.blocks;
  if (tiles > INT32_MAX) return Status::unsupported;
  p.end = static_cast<int>(tiles);
  if (!p.walks) return start<Math>(a, &nvfp4_many<Math>, tiles, Math::kSmem, x, p, rows);
  const int sms = current_device().sms;
  const SplitProblem problem = problem_of(a, Math::kCols, Math::kGroups * kNvfp4Rows);
  const int parts = std::min(rest_parts(problem), p.quads);
  const int rest = parts > 1 ? p.end % sms : 0;
  p.end -= rest;
  const Status status =
      start<Math>(a, &nvfp4_many<Math>, std::min<int64_t>(p.end, sms), Math::kSmem, x, p, rows);
  if (status != Status::ok || rest == 0) return status;
  p.begin = p.end, p.end += rest;
  p.walks = false, p.cluster = parts, p.parts = shares_of(p.quads, parts);
  p.cluster_factor = quotient_factor(parts);
  return start<Math>(a, &nvfp4_many<Math>, rest, Math::kSmem, x, p, rows);
}

// Rows that may meet one matrix: of groups twice as many as on average, but where blocks so large
// take longer than two of half the size for the largest groups (NVIDIA H200, 32 to 128 experts).
int64_t rows_of(const Nvfp4Args& a) {
  if (a.experts != nullptr) return 1;
  if (a.groups.count <= 1) return a.m;
  const int64_t mean = (a.m + a.groups.count - 1) / a.groups.count;
  const int64_t most = mean > 8 && mean <= 12 ? 16 : mean > 16 && mean <= 24 ? 32 : 2 * mean;
  return std::min(a.m, most);
}

// NOTE: up to 64 rows all in one way, so that a row has the same sums.
Status run_bf16(Nvfp4Args a) {
  const int64_t m = rows_of(a);
  if (a.quantizes) {
    const int64_t quads = (a.k + kNvfp4Quad - 1) / kNvfp4Quad;
    const int cluster = num_splits(problem_of(a, 8, kNvfp4Rows));
    // NOTE: what is made leaves no room for more than two CTAs on an SM.
    const bool few = a.groups.count == 0 && ctas_of(a, cluster) <= 2 * current_device().sms;
    const bool own = m <= 8 && (few || a.experts != nullptr) &&
                     m * ((quads + cluster - 1) / cluster) <= kNvfp4OwnQuads;
    if (own && a.x_element == Element::e4m3) {
      const Status status = run<Nvfp4Math<8, false, true, true>>(a);
      if (status != Status::unsupported) return status;
    }
    const Status status = prepare(a);
    if (status != Status::ok) return status;
  }
  if (m <= 8) return run<Nvfp4Math<8, false, false, true>>(a);
  if (m <= 16) return run<Nvfp4Math<16, false>>(a);
  if (m <= 32) return run<Nvfp4Math<32, false>>(a);
  const bool thin = a.n <= 3072 && m > 96 && m <= 128;
  const int asked = a.execution.kernel > 0 ? a.execution.kernel / 16 - 1 : -1;
  if (asked < 0 && (m <= 64 || thin)) return run<Nvfp4Math<64, false>>(a);
  switch (asked < 0 ? nvfp4_shape(m, a.n, a.k, current_device().sms) : asked) {
    case 0:
      return run_many<Nvfp4Many<128, 2, false>>(a);
    case 1:
      return run_many<Nvfp4Many<256, 2, false>>(a);
    default:
      return run_many<Nvfp4Many<128, 3, false>>(a);
  }
}

Status run_f16(const Nvfp4Args& a) {
  const int64_t m = rows_of(a);
  return m <= 8    ? run<Nvfp4Math<8, true>>(a)
         : m <= 64 ? run<Nvfp4Math<64, true>>(a)
                   : run_many<Nvfp4Many<256, 2, true>>(a);
}

}  // namespace

Status nvfp4_product(const Nvfp4Args& a) {
  const Status status = check(a);
  if (status != Status::ok) return status;
  if (current_device().sms == 0) return Status::unsupported;
  return a.quantizes || a.x_dtype == DType::bf16 ? run_bf16(a) : run_f16(a);
}

}  // namespace te_mx::sm90
