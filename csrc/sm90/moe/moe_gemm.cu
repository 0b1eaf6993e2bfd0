// The launcher of moe_gemm.cuh.
#include <algorithm>

#include "common/device.h"
#include "common/formats.h"
#include "common/launch.h"
#include "moe/moe_gemm.cuh"
#include "te_mx/sm90.h"
#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {
namespace {

using namespace moe;

int log2_of(int v) { return v <= 1 ? 0 : 1 + log2_of(v / 2); }

bool aligned(const void* p, int to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

Status check(const MoeGemmArgs& a) {
  const Routing& r = a.routing;
  if (a.rhs.codes == nullptr || a.lhs.codes == nullptr || a.out == nullptr || a.lhs.k != a.rhs.k ||
      a.experts < 1 || r.block_m < 1 || r.a_div < 1 || r.blocks < 0 || r.routed < 0 ||
      r.expert_ids == nullptr)
    return Status::bad_argument;
  if (!known(a.out_dtype) || !known(a.bias_dtype)) return Status::bad_argument;
  Status status = check_mx(a.rhs.element, a.rhs.scaling);
  if (status == Status::ok) status = check_mx(a.lhs.element, a.lhs.scaling);
  if (status != Status::ok) return status;
  const int64_t most = (int64_t{1} << 31) - 257;
  const int64_t pieces = r.blocks * pieces_of_block(r, kColumn);
  const bool packed = a.rhs.layout == Layout::tiles;
  if (a.lhs.layout != Layout::k_last || (!packed && a.rhs.layout != Layout::k_last))
    return Status::bad_argument;
  if (!is_fp8(a.lhs.element) || !is_of_weights(a.rhs.element) || a.rhs.k % kBlock != 0 ||
      a.rhs.rows < kRows ||
      (packed && (a.rhs.rows % kRows != 0 || a.rhs.element != Element::e4m3)) ||
      a.rhs.rows > most || a.rhs.k > most || r.routed > most || r.positions > most ||
      pieces > most || !aligned(a.rhs.codes, 16) || !aligned(a.lhs.codes, 8) ||
      !aligned(a.rhs.scales, 2) || !aligned(a.lhs.scales, 4))
    return Status::unsupported;
  const int64_t slices = (a.rhs.rows + kRows - 1) / kRows;
  return kMostPieces * slices > most ? Status::unsupported : Status::ok;
}

template <Element kW, int kColumns, int kCtas>
Status launch(const MoeParams& p, int64_t pieces, const Device& device, void* stream) {
  const auto kernel = &moe_gemm_kernel<kW, kColumns, kCtas>;
  const int64_t items = pieces * p.slices, ctas = int64_t{device.sms} * kCtas;
  const dim3 grid(static_cast<unsigned>(items < ctas ? items : ctas));
  const int smem = static_cast<int>(room_bytes<kW, kColumns, kCtas>(pieces));
  return launch_early(kernel, {grid, kWarps * 32, stream, smem}, p);
}

// Whether an SM has three CTAs: where there is room, and items are done in fewer turns of a CTA on
// every place. Three leave fewer registers, which makes as many turns slower in MXFP4.
template <Element kW>
bool three_are_better(int64_t pieces, int64_t items, int sms) {
  constexpr int64_t kSmem = 228 * 1024, kReserved = 1024;  // of an SM, of every CTA
  if (3 * (room_bytes<kW, 1, 3>(pieces) + kReserved) > kSmem) return false;
  const auto turns = [&](int ctas) { return ctas * ceil_div(items, int64_t{ctas} * sms); };
  return turns(3) < turns(2) + (kW == Element::e2m1 ? 0 : 1);
}

template <Element kW>
Status launch_any(const MoeParams& p, int columns, int64_t pieces, const Execution& execution) {
  const Device device = current_device();
  if (device.sms == 0) return Status::unsupported;
  if (columns == 4) return launch<kW, 4, 2>(p, pieces, device, execution.stream);
  if (columns == 2) return launch<kW, 2, 2>(p, pieces, device, execution.stream);
  return three_are_better<kW>(pieces, pieces * p.slices, device.sms)
             ? launch<kW, 1, 3>(p, pieces, device, execution.stream)
             : launch<kW, 1, 2>(p, pieces, device, execution.stream);
}

// Eights of rows that a piece has: as many as blocks of the lists have room for and experts in the
// mean would half fill. Those that stay empty cost little.
int columns_of(const Routing& r, int64_t experts) {
  if (r.sorted_token_ids == nullptr) return 1;
  const int64_t rows = 2 * r.routed / experts;
  return r.block_m >= 32 && rows > 16 ? 4 : r.block_m >= 16 && rows > 8 ? 2 : 1;
}

}  // namespace

Status moe_gemm(const MoeGemmArgs& a) {
  const Status status = check(a);
  if (status != Status::ok) return status;
  const Routing& r = a.routing;
  const int columns = columns_of(r, a.experts);
  const int64_t pieces = r.blocks * pieces_of_block(r, columns * kColumn);
  if (pieces == 0 || r.routed == 0) return Status::ok;
  MoeParams p{};
  p.w = a.rhs.codes, p.w_scales = static_cast<const uint8_t*>(a.rhs.scales);
  p.x = a.lhs.codes, p.x_scales = static_cast<const uint8_t*>(a.lhs.scales);
  p.routing = r;
  p.experts = a.experts;
  p.n = static_cast<int>(a.rhs.rows), p.k = static_cast<int>(a.rhs.k);
  p.blocks = p.k / static_cast<int>(kBlock);
  p.chunks = (p.k + kChunk - 1) / kChunk;
  p.parts = num_splits({SplitKind::routed, p.n, p.k}), p.shares = shares_of(p.chunks, p.parts);
  p.groups = kWarps / p.parts;
  p.shift = log2_of(p.groups * kRows);
  p.slices = (p.n + p.groups * kRows - 1) / (p.groups * kRows);
  p.e5m2 = a.lhs.element == Element::e5m2;
  p.packed = a.rhs.layout == Layout::tiles;
  p.tiles = static_cast<int>(packed_tiles(a.rhs.rows));
  p.bias = a.bias, p.bias_dtype = a.bias_dtype, p.weights = a.weights;
  p.out = a.out, p.out_dtype = a.out_dtype;
  for (int64_t first = 0; first < pieces; first += kMostPieces) {
    p.first_piece = static_cast<int>(first);
    const int64_t now = std::min<int64_t>(kMostPieces, pieces - first);
    const Status launched = with_weights(
        a.rhs.element, [&]<Element kW>() { return launch_any<kW>(p, columns, now, a.execution); });
    if (launched != Status::ok) return launched;
  }
  return Status::ok;
}

}  // namespace te_mx::sm90
