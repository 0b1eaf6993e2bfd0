// Plain codes of 4 bits to tiles before a product: those of one operand or of both in one launch.
#include <cuda_runtime_api.h>

#include "common/device.h"
#include "common/launch.h"
#include "quantize/unpack_kernel.cuh"

namespace te_mx::sm90 {

namespace {

constexpr int64_t kMostRowTiles = 65535;  // of both, along the grid's y
constexpr int64_t kMostOffset = 1 << 24;  // bytes of a row, 128 of which have offsets of 32 bits

// ok, or why this kernel does not take the operand.
Status side_of(const PackArgs& args, UnpackSide& s) {
  const Status status = check_plain(args.operand);
  if (status != Status::ok) return status;
  const PackTask a = task_of(args);
  if (a.element != Element::e2m1 || a.k_first || args.out.layout != Layout::tiles)
    return Status::unsupported;
  if (reinterpret_cast<uintptr_t>(a.out.codes) % 16 != 0) return Status::bad_argument;
  const int64_t row_tiles = (a.rows + kTile - 1) / kTile, k_tiles = (a.k + kTile - 1) / kTile;
  if (row_tiles > kMostRowTiles || k_tiles > INT32_MAX) return Status::unsupported;
  s.codes = a.codes, s.scales = a.scales;
  s.out_codes = a.out.codes, s.out_scales = a.out.scales;
  s.ld = row_bytes(a.k, true), s.out_ld = packed_ld(a.k), s.blocks = (a.k + 31) / 32;
  s.row_tiles = static_cast<int>(row_tiles);
  s.padded_tiles = static_cast<int>(packed_tiles(a.rows));
  s.last_rows = static_cast<int>((a.rows - 1) % kTile + 1);
  s.vectors = s.ld % 8 == 0 && reinterpret_cast<uintptr_t>(a.codes) % 8 == 0;
  s.words = s.vectors && s.blocks % 4 == 0 && reinterpret_cast<uintptr_t>(a.scales) % 4 == 0 &&
            s.out_ld < kMostOffset;
  return Status::ok;
}

Status launch(UnpackParams& p, int64_t k, void* stream) {
  p.k_tiles = static_cast<int>((k + kTile - 1) / kTile);
  p.last_k = static_cast<int>((k - 1) % kTile + 1);
  const int64_t row_tiles = int64_t{p.sides[0].row_tiles} + p.sides[1].row_tiles;
  if (row_tiles == 0 || k == 0) return Status::ok;
  if (row_tiles > kMostRowTiles) return Status::unsupported;
  cudaLaunchAttribute early = early_start();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.k_tiles), static_cast<unsigned>(row_tiles));
  config.blockDim = dim3(kUnpackThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early, config.numAttrs = 1;
  return started(cudaLaunchKernelEx(&config, unpack_kernel, p));
}

}  // namespace

Status unpack(const PackArgs& args) {
  UnpackParams p{};
  const Status status = side_of(args, p.sides[0]);
  return status == Status::ok ? launch(p, args.operand.k, args.execution.stream) : status;
}

Status unpack_two(const PackArgs& first, const PackArgs& second) {
  UnpackParams p{};
  Status status = side_of(first, p.sides[0]);
  if (status == Status::ok) status = side_of(second, p.sides[1]);
  if (status != Status::ok) return status;
  if (first.operand.k != second.operand.k) return Status::bad_argument;
  return launch(p, first.operand.k, first.execution.stream);
}

}  // namespace te_mx::sm90
