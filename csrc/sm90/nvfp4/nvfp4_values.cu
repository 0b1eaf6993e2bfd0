// NVFP4 weights that stand still (sm90_nvfp4.h) to what their codes and block scales stand for.
#include "common/formats.h"
#include "common/launch.h"
#include "mxtile/sm90/shared.cuh"
#include "nvfp4/nvfp4_operand.cuh"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::sm90 {
namespace {

constexpr int kWarps = 8,
              kRowBytes = 2 * kNvfp4Quad + 16;  // NOTE: rows of 16 bytes more, no bank twice

// A warp has a quad.
template <bool kHalf>
__global__ void __launch_bounds__(32 * kWarps)
    nvfp4_values(const uint8_t* __restrict__ w, const uint8_t* __restrict__ w_scales, int64_t all,
                 int n, int k, uint16_t* out) {
  using Operand = Nvfp4Operand<kHalf>;
  __shared__ __align__(16) uint8_t room[kWarps][16 * kRowBytes];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int quads = (k + kNvfp4Quad - 1) / kNvfp4Quad;
  tile::let_dependents_start();
  tile::await_predecessors();
  const int64_t quad = int64_t{blockIdx.x} * kWarps + warp;
  if (quad >= all) return;
  const uint4* const from = reinterpret_cast<const uint4*>(w + quad * kNvfp4Codes);
  const uint4 codes[2] = {__ldcs(from + lane), __ldcs(from + 32 + lane)};
  const uint4 scales =
      __ldcs(reinterpret_cast<const uint4*>(w_scales + quad * kNvfp4Scales) + lane / 4);
  const uint32_t words[8] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w,
                             codes[1].x, codes[1].y, codes[1].z, codes[1].w};
  const uint32_t pairs[4] = {scales.x, scales.y, scales.z, scales.w};
  // Lane l gives stmatrix_x4 row l % 8 of matrix l / 8: of the first rows, of the others, 8 of k
  // further on.
  const uint32_t base = tile::smem_addr(room[warp]);
  const uint32_t to = base + lane % 16 * kRowBytes + lane / 16 * 16;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32_t a[4];
    Operand::make(a, words[j],
                  j % 2 == 0 ? Operand::template scales<0>(pairs[j / 2])
                             : Operand::template scales<1>(pairs[j / 2]));
#pragma unroll
    for (uint32_t& one : a) one = Operand::up(one);
    tile::stmatrix_x4(to + j * 32, a[0], a[1], a[2], a[3]);
  }
  __syncwarp();
  const int row0 =
      static_cast<int>(quad / 4 / quads) * kNvfp4Rows + static_cast<int>(quad % 4) * 16;
  const int k0 = static_cast<int>(quad / 4 % quads) * kNvfp4Quad + lane % 16 * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = 2 * i + lane / 16, row = row0 + r;
    if (row >= n || k0 >= k) continue;
    const uint4 v = tile::ld_shared_u32x4(base + r * kRowBytes + lane % 16 * 16);
    uint16_t* const at = out + int64_t{row} * k + k0;
    if (k % 8 == 0) {
      *reinterpret_cast<uint4*>(at) = v;
      continue;
    }
    const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (k0 + j < k) at[j] = static_cast<uint16_t>(four[j / 2] >> (16 * (j % 2)));
  }
}

}  // namespace

Status nvfp4_to_values(const uint8_t* w, const uint8_t* w_scales, int64_t n, int64_t k, DType dtype,
                       void* out, void* stream) {
  if (w == nullptr || w_scales == nullptr || out == nullptr || n < 1 || k < 1)
    return Status::bad_argument;
  constexpr int64_t kMost = (int64_t{1} << 31) - 257;
  if (n > kMost || k > kMost || dtype == DType::f32) return Status::unsupported;
  if (reinterpret_cast<uintptr_t>(w) % 16 != 0 || reinterpret_cast<uintptr_t>(w_scales) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(out) % 16 != 0)
    return Status::unsupported;
  const int64_t all = 4 * nvfp4_blocks(n, k), blocks = (all + kWarps - 1) / kWarps;
  if (blocks > kMost) return Status::unsupported;
  const Launch at{dim3(static_cast<unsigned>(blocks)), dim3(32 * kWarps), stream};
  const auto kernel = dtype == DType::bf16 ? nvfp4_values<false> : nvfp4_values<true>;
  return launch_early(kernel, at, w, w_scales, all, static_cast<int>(n), static_cast<int>(k),
                      static_cast<uint16_t*>(out));
}

}  // namespace te_mx::sm90
