// Entry points of pack: one operand, and those of groups.
#include <cuda_runtime_api.h>

#include "common/device.h"
#include "quantize/pack_kernel.cuh"

namespace te_mx::sm90 {

namespace {

template <bool kTransposed, bool kStacked>
void launch(const PackParams& p, int64_t count, cudaStream_t stream) {
  const int64_t steps = (p.a.k + 127) / 128;
  constexpr int64_t kMaxY = 32768;
  const dim3 grid(static_cast<unsigned>(count * p.row_tiles),
                  static_cast<unsigned>(steps < kMaxY ? steps : kMaxY),
                  static_cast<unsigned>((steps + kMaxY - 1) / kMaxY));
  with_element(p.a.element, [&]<tile::Fp8 kFmt>() {
    pack_kernel<kFmt, kTransposed, kStacked><<<grid, kPackThreads, 0, stream>>>(p);
    return Status::ok;
  });
}

template <bool kStacked>
Status run(const PackArgs& args, const GroupTable& groups, int64_t count) {
  const Status status = check_plain(args.operand);
  if (status != Status::ok) return status;
  const PackTask a = task_of(args);
  if (args.out.layout != Layout::tiles) return Status::unsupported;
  if (a.spread < 0 || a.spread > kMaxSpread) return Status::bad_argument;
  if (a.rows == 0 || a.k == 0) return Status::ok;
  if (reinterpret_cast<uintptr_t>(a.out.codes) % 16 != 0) return Status::bad_argument;
  const int64_t row_tiles = (a.rows + kTile - 1) / kTile, steps = (a.k + kTile - 1) / kTile;
  if (count * row_tiles > INT32_MAX || steps > INT32_MAX) return Status::unsupported;
  const bool fp4 = a.element == Element::e2m1;
  const int64_t width = a.k_first ? a.rows : row_bytes(a.k, fp4);
  const int64_t vector = a.k_first || fp4 ? 8 : 16;
  PackParams p{};
  p.a = a;
  if (fp4) p.a.spread = tile::kFp4Spread;
  p.row_tiles = static_cast<int>(row_tiles);
  p.last_rows = static_cast<int>((a.rows - 1) % kTile + 1);
  p.last_k = static_cast<int>((a.k - 1) % kTile + 1);
  p.groups = groups;
  p.vectors = width % vector == 0 && reinterpret_cast<uintptr_t>(a.codes) % vector == 0;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  a.k_first ? launch<true, kStacked>(p, count, stream) : launch<false, kStacked>(p, count, stream);
  return started(cudaGetLastError());
}

}  // namespace

Status pack(const PackArgs& a) { return run<false>(a, {}, 1); }

Status pack_stacked(const PackArgs& a) {
  if (!valid(a.groups)) return Status::bad_argument;
  return run<true>(a, group_table(a.groups), a.groups.count);
}

}  // namespace te_mx::sm90
