// NVFP4 weights that stand still (sm90_nvfp4.h) to what they stand for.
#include "common/formats.h"
#include "common/launch.h"
#include "mxtile/sm90/shared.cuh"
#include "nvfp4/nvfp4_operand.cuh"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::sm90 {
namespace {

constexpr int kWarps = 8;
constexpr int kRowBytes = 2 * kNvfp4Quad + 16;  // NOTE: so that eight rows meet all banks

struct Nvfp4Values {
  const uint8_t* w;
  const uint8_t* w_scales;
  const float* scale;  // of the tensor, or of each of its rows
  bool scale_rows;
  int64_t quads;
  int n, k;
  uint16_t* out;
};

// A warp has a quad.
template <bool kHalf>
__global__ void __launch_bounds__(32 * kWarps) nvfp4_values(const Nvfp4Values p) {
  using Operand = Nvfp4Operand<false>;
  __shared__ __align__(16) uint8_t room[kWarps][16 * kRowBytes];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int steps = (p.k + kNvfp4Quad - 1) / kNvfp4Quad;
  tile::let_dependents_start();
  tile::await_predecessors();
  const int64_t quad = int64_t{blockIdx.x} * kWarps + warp;
  if (quad >= p.quads) return;
  const int row0 =
      static_cast<int>(quad / 4 / steps) * kNvfp4Rows + static_cast<int>(quad % 4) * 16;
  const int k0 = static_cast<int>(quad / 4 % steps) * kNvfp4Quad + lane % 16 * 8;
  const uint4* const from = reinterpret_cast<const uint4*>(p.w + quad * kNvfp4Codes);
  const uint4 codes[2] = {__ldcs(from + lane), __ldcs(from + 32 + lane)};
  const uint4 scales =
      __ldcs(reinterpret_cast<const uint4*>(p.w_scales + quad * kNvfp4Scales) + lane / 4);
  const int low = min(row0 + lane / 4, p.n - 1), high = min(low + 8, p.n - 1);
  const float of_rows[2] = {__ldg(p.scale + (p.scale_rows ? low : 0)),
                            __ldg(p.scale + (p.scale_rows ? high : 0))};
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
    for (int i = 0; i < 4; ++i) {
      // NOTE: the first product is exact, the second may round.
      const float even = __uint_as_float(a[i] << 16) * kNvfp4Up * of_rows[i % 2];
      const float odd = __uint_as_float(a[i] & 0xFFFF0000u) * kNvfp4Up * of_rows[i % 2];
      a[i] = kHalf ? as<uint32_t>(__floats2half2_rn(even, odd))
                   : as<uint32_t>(__floats2bfloat162_rn(even, odd));
    }
    tile::stmatrix_x4(to + j * 32, a[0], a[1], a[2], a[3]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = 2 * i + lane / 16, row = row0 + r;
    if (row >= p.n || k0 >= p.k) continue;
    const uint4 v = tile::ld_shared_u32x4(base + r * kRowBytes + lane % 16 * 16);
    uint16_t* const at = p.out + int64_t{row} * p.k + k0;
    if (p.k % 8 == 0) {
      *reinterpret_cast<uint4*>(at) = v;
      continue;
    }
    const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (k0 + j < p.k) at[j] = static_cast<uint16_t>(four[j / 2] >> (16 * (j % 2)));
  }
}

}  // namespace

Status nvfp4_to_values(const Nvfp4Args& a) {
  if (a.w == nullptr || a.w_scales == nullptr || a.scale == nullptr || a.out == nullptr ||
      a.n < 1 || a.k < 1)
    return Status::bad_argument;
  constexpr int64_t kMost = (int64_t{1} << 31) - 257;
  const auto whole = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (a.n > kMost || a.k > kMost || a.out_dtype == DType::f32 || a.groups.count != 0 ||
      a.ldo != a.k || !whole(a.w) || !whole(a.w_scales) || !whole(a.out))
    return Status::unsupported;
  const Nvfp4Values p{a.w,
                      a.w_scales,
                      a.scale,
                      a.scale_rows,
                      4 * nvfp4_blocks(a.n, a.k),
                      static_cast<int>(a.n),
                      static_cast<int>(a.k),
                      static_cast<uint16_t*>(a.out)};
  const int64_t ctas = (p.quads + kWarps - 1) / kWarps;
  if (ctas > kMost) return Status::unsupported;
  const Launch at{dim3(static_cast<unsigned>(ctas)), dim3(32 * kWarps), a.execution.stream};
  return launch_early(a.out_dtype == DType::bf16 ? nvfp4_values<false> : nvfp4_values<true>, at, p);
}

}  // namespace te_mx::sm90
