// Two matrices in one launch: each CTA knows of which it is, and is that one's quantizer. Of bf16
// to tiles of E4M3, which is what small layers wait for: a launch takes the host 3 us.
#include "quantize/quantize_two.h"

#include "quantize/quantize_launch.cuh"

namespace te_mx::sm90 {

namespace {

using T = __nv_bfloat16;

struct TwoParams {
  QuantizeParams of[2];
  const void* x[2];
  int width[2];  // CTAs in a row of the grid of each, which find_tile() would walk
  int first;     // CTAs of the first one
  uint32_t* zeros;
  int words;  // of them
};

__global__ void __launch_bounds__(kQuantizeThreads, 4)
    quantize_two_kernel(const __grid_constant__ TwoParams two) {
  __shared__ QuantizeSmem s;
  tile::let_dependents_start();
  tile::await_predecessors();
  const int cta = static_cast<int>(blockIdx.x), which = cta < two.first ? 0 : 1;
  if (cta == 0) {
    for (int i = threadIdx.x; i < two.words; i += kQuantizeThreads) two.zeros[i] = 0;
  }
  const QuantizeParams& p = two.of[which];
  const int own = which == 0 ? cta : cta - two.first;
  const int row = own / two.width[which], in_row = own % two.width[which];
  const int before = (row << p.group_bits) + (in_row & ((1 << p.group_bits) - 1));
  if (before >= p.row_tiles) return;
  Tile t;
  place_tile(t, p, p.row_tiles - 1 - before, in_row >> p.group_bits);
  const Place at;
  const int64_t row0 = t.r0 + at.r, col0 = t.c0() + at.c;
  typename Input<T>::Word x[8][4];
  load_patch<T>(x, static_cast<const T*>(two.x[which]) + row0 * p.a.x_stride + col0, p.a.x_stride,
                t.rows - at.r, t.cols - at.c, p.x_vectors, &s.codes[0][0] + 64 * threadIdx.x);
  quantize_patch<T, tile::Fp8::e4m3, false>(p, s, x, t, at);
}

}  // namespace

Status quantize_at_once(const QuantizeTask& one, const QuantizeTask* two, uint32_t* zeros,
                        int64_t words) {
  // NOTE: of more tiles the host does not wait, and two kernels beside each other are 1 % faster.
  constexpr int64_t kMostTiles = 2048;
  const QuantizeTask* const tasks[] = {&one, two};
  TwoParams p{};
  p.width[1] = 1, p.zeros = zeros, p.words = static_cast<int>(words);
  int64_t ctas = 0, tiles = 0;
  for (int i = 0; i < 2 && tasks[i] != nullptr; ++i) {
    const QuantizeTask& a = *tasks[i];
    if (a.x_dtype != DType::bf16 || a.element != Element::e4m3 || a.rows == 0 || a.cols == 0)
      return Status::unsupported;
    const Status status = quantize_params(a, p.of[i]);
    if (status != Status::ok) return status;
    if (wants_plain(p.of[i])) return Status::unsupported;
    const dim3 grid = tile_grid(p.of[i], p.of[i].col_tiles);
    p.x[i] = a.x, p.width[i] = static_cast<int>(grid.x);
    tiles += static_cast<int64_t>(p.of[i].row_tiles) * p.of[i].col_tiles;
    ctas += static_cast<int64_t>(grid.x) * grid.y * grid.z;
    if (ctas > INT32_MAX || words > INT32_MAX || (i == 1 && tiles > kMostTiles))
      return Status::unsupported;
    if (i == 0) p.first = static_cast<int>(ctas);
  }
  const auto stream = static_cast<cudaStream_t>(one.stream);
  const int smem = spreading_smem(tiles, current_device().sms);
  const Status status = launch_early(
      quantize_two_kernel, {dim3(static_cast<unsigned>(ctas)), kQuantizeThreads, stream, smem}, p);
  const QuantizeTask& last = two == nullptr ? one : *two;
  if (status != Status::ok || last.col_sum == nullptr) return status;
  const int row_tiles = p.of[two == nullptr ? 0 : 1].row_tiles;
  return launch_sums(last.col_sum_ws, last.col_sum, last.col_sum_dtype, row_tiles, last.cols,
                     stream);
}

}  // namespace te_mx::sm90
