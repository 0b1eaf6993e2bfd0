// Entry points of pack: one operand, those of groups, and those of 4 bits of a product.
#include <cuda_runtime_api.h>

#include "common/device.h"
#include "common/launch.h"
#include "common/spread.h"
#include "quantize/pack_kernel.cuh"

namespace te_mx::sm90 {

namespace {

template <bool kTransposed, bool kStacked>
Status launch(const PackParams& p, int64_t count, void* stream) {
  const int64_t steps = (p.a.k + 127) / 128;
  constexpr int64_t kMaxY = 32768;
  const dim3 grid(static_cast<unsigned>(count * p.row_tiles),
                  static_cast<unsigned>(steps < kMaxY ? steps : kMaxY),
                  static_cast<unsigned>((steps + kMaxY - 1) / kMaxY));
  const int smem = spread_smem(int64_t{grid.x} * grid.y);
  return with_element(p.a.element, [&]<tile::Fp8 kFmt>() {
    return launch_early(pack_kernel<kFmt, kTransposed, kStacked>,
                        {grid, kPackThreads, stream, smem}, p);
  });
}

// ok, or what is wrong with the operand. Sides without elements have no tiles.
Status side_of(const PackArgs& args, PackSide& side, bool stands = false) {
  const Status status =
      stands ? check_mx(args.operand.element, args.operand.scaling) : check_plain(args.operand);
  if (status != Status::ok) return status;
  const PackTask a = task_of(args);
  if (args.out.layout != Layout::tiles) return Status::unsupported;
  if (a.spread < 0 || a.spread > kByRows) return Status::bad_argument;
  side.a = a;
  if (a.rows == 0 || a.k == 0) return Status::ok;
  if (reinterpret_cast<uintptr_t>(a.out.codes) % 16 != 0) return Status::bad_argument;
  const int64_t row_tiles = (a.rows + kTile - 1) / kTile, steps = (a.k + kTile - 1) / kTile;
  if (row_tiles > INT32_MAX || steps > INT32_MAX) return Status::unsupported;
  const bool fp4 = a.element == Element::e2m1;
  const int64_t width = a.k_first ? a.rows : row_bytes(a.k, fp4);
  const int64_t vector = a.k_first || fp4 ? 8 : 16;
  side.ld = width, side.scale_ld = a.k_first ? a.rows : (a.k + 31) / 32;
  side.out_ld = packed_ld(a.k);
  side.row_tiles = static_cast<int>(row_tiles);
  side.last_rows = static_cast<int>((a.rows - 1) % kTile + 1);
  side.last_k = static_cast<int>((a.k - 1) % kTile + 1);
  side.vectors = width % vector == 0 && reinterpret_cast<uintptr_t>(a.codes) % vector == 0;
  side.words =
      side.vectors && side.scale_ld % 4 == 0 && reinterpret_cast<uintptr_t>(a.scales) % 4 == 0;
  return Status::ok;
}

template <bool kStacked>
Status run(const PackArgs& args, const GroupTable& groups, int64_t count) {
  PackParams p{};
  const Status status = side_of(args, p);
  if (status != Status::ok || p.row_tiles == 0) return status;
  if (count * p.row_tiles > INT32_MAX) return Status::unsupported;
  p.groups = groups;
  return p.a.k_first ? launch<true, kStacked>(p, count, p.a.stream)
                     : launch<false, kStacked>(p, count, p.a.stream);
}

// The same of a side of a product.
Status unpacked_side_of(const PackArgs& args, PackSide& side) {
  const Status status = side_of(args, side);
  if (status != Status::ok) return status;
  return side.a.element == Element::e2m1 && !side.a.k_first ? Status::ok : Status::unsupported;
}

Status launch_unpack(const UnpackParams& p, int64_t k, void* stream) {
  constexpr int64_t kMaxY = 65535;
  const int64_t row_tiles = int64_t{p.sides[0].row_tiles} + p.sides[1].row_tiles;
  if (row_tiles == 0) return Status::ok;
  if (row_tiles > kMaxY) return Status::unsupported;
  const dim3 grid(static_cast<unsigned>((k + kTile - 1) / kTile), static_cast<unsigned>(row_tiles));
  const int smem = spread_smem(int64_t{grid.x} * grid.y);
  return launch_early(unpack_kernel, {grid, kPackThreads, stream, smem}, p);
}

}  // namespace

Status pack(const PackArgs& a) { return run<false>(a, {}, 1); }

Status pack_stacked(const PackArgs& a) {
  if (!valid(a.groups)) return Status::bad_argument;
  return run<true>(a, group_table(a.groups), a.groups.count);
}

Status unpack_stacked(const PackArgs& args, int64_t rows) {
  if (args.operand.layout != Layout::standing) return Status::unsupported;
  if (args.groups.count < 0 || (args.groups.count > 0 && !valid(args.groups)))
    return Status::bad_argument;
  StandingParams p{};
  const Status status = side_of(args, p.side, true);
  if (status != Status::ok || p.side.row_tiles == 0) return status;
  const int64_t groups = args.groups.count > 0 ? args.groups.count : 1;
  if (p.side.a.element != Element::e2m1 || groups * p.side.row_tiles > 65535)
    return Status::unsupported;
  if (args.groups.count > 0) p.groups = group_table(args.groups);
  p.blocks = nvfp4_blocks(rows, p.side.a.k);
  const dim3 grid(static_cast<unsigned>((p.side.a.k + kTile - 1) / kTile),
                  static_cast<unsigned>(groups * p.side.row_tiles));
  return launch_early(unpack_standing, {grid, kPackThreads, args.execution.stream}, p);
}

Status unpack(const PackArgs& args) {
  UnpackParams p{};
  if (args.operand.layout == Layout::standing) return unpack_stacked(args, args.operand.rows);
  const Status status = unpacked_side_of(args, p.sides[0]);
  return status == Status::ok ? launch_unpack(p, args.operand.k, args.execution.stream) : status;
}

Status unpack_two(const PackArgs& first, const PackArgs& second) {
  if (first.operand.layout == Layout::standing || second.operand.layout == Layout::standing) {
    const Status status = unpack(first);
    return status == Status::ok ? unpack(second) : status;
  }
  UnpackParams p{};
  Status status = unpacked_side_of(first, p.sides[0]);
  if (status == Status::ok) status = unpacked_side_of(second, p.sides[1]);
  if (status != Status::ok) return status;
  if (first.operand.k != second.operand.k) return Status::bad_argument;
  return launch_unpack(p, first.operand.k, first.execution.stream);
}

}  // namespace te_mx::sm90
