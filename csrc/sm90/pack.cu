// Entry point of pack.
#include <cuda_runtime_api.h>

#include "pack_kernel.cuh"

namespace te_mx::sm90 {

Status pack(const PackArgs& a) {
  if (a.rows < 0 || a.k < 0 || a.spread < 0 || a.spread > kMaxSpread) return Status::bad_argument;
  if (a.rows == 0 || a.k == 0) return Status::ok;
  if (reinterpret_cast<uintptr_t>(a.out.codes) % 16 != 0) return Status::bad_argument;
  const int64_t row_tiles = (a.rows + 127) / 128, tiles = row_tiles * ((a.k + 127) / 128);
  if (tiles > INT32_MAX) return Status::unsupported;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const auto grid = static_cast<unsigned>(tiles);
  if (a.fmt == Format::e4m3) {
    pack_kernel<tile::Fp8::e4m3><<<grid, kPackThreads, 0, stream>>>(a, row_tiles);
  } else {
    pack_kernel<tile::Fp8::e5m2><<<grid, kPackThreads, 0, stream>>>(a, row_tiles);
  }
  return cudaGetLastError() == cudaSuccess ? Status::ok : Status::unsupported;
}

}  // namespace te_mx::sm90
