// The packed operands of the columns of plain weights that are held by rows alone: codes to values
// in registers, and there the quantizer goes on. Values are those of dequantize.cu in bf16.
#include "quantize/plain_codes.cuh"
#include "quantize/plain_tasks.h"
#include "quantize/quantize_launch.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace {

struct RequantizeParams {
  QuantizeParams q;
  const uint8_t* codes;          // [count, rows, cols], two a byte in FP4
  const uint8_t* scales;         // [count, rows, ceil(cols/32)]
  int64_t out_codes, out_words;  // from matrix to matrix
  bool vectors;                  // codes have aligned vectors of 8 only
};

// A thread's 8 x 8 elements; those that do not exist are zero.
template <tile::Fp8 kFmt>
__device__ __forceinline__ void load_values(uint32_t (&x)[8][4], const RequantizeParams& p,
                                            const Tile& t, const Place& at, uint8_t* slot) {
  const int64_t cols = p.q.a.cols, blocks = (cols + 31) / 32;
  const int64_t row = blockIdx.z * p.q.a.rows + t.r0 + at.r, col = t.c0() + at.c;
  const int rows = t.cols > at.c ? t.rows - at.r : 0;
  uint32_t w[8][2], e[8];
  if constexpr (kIsFp4<kFmt>) {
    const int64_t ld = row_bytes(cols, true);
    uint32_t nibbles[8][1];
    load_codes<8, 4>(nibbles, p.codes + row * ld + col / 2, ld, 1, rows, (t.cols - at.c + 1) / 2,
                     p.vectors, slot);
    const tile::Fp4Table table(tile::kFp4Headroom);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      w[k][0] = table.four(nibbles[k][0]), w[k][1] = table.four(nibbles[k][0] >> 16);
  } else {
    load_codes<8, 8>(w, p.codes + row * cols + col, cols, 1, rows, t.cols - at.c, p.vectors, slot);
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) e[k] = k < rows ? __ldg(p.scales + (row + k) * blocks + col / 32) : 0;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float scale = tile::e8m0_to_float(e[k]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t two = w[k][j / 2] >> (j % 2 * 16);
      const float2 v =
          __half22float2(tile::fp8x2_to_half2<kTileFmt<kFmt>>(static_cast<uint16_t>(two)));
      const __nv_bfloat162 values = __float22bfloat162_rn({v.x * scale, v.y * scale});
      x[k][j] = *reinterpret_cast<const uint32_t*>(&values);
    }
  }
}

template <tile::Fp8 kFmt>
__global__ void __launch_bounds__(kQuantizeThreads, kIsFp4<kFmt> ? 3 : 4)
    requantize_kernel(const __grid_constant__ RequantizeParams all) {
  __shared__ QuantizeSmem s;
  tile::let_dependents_start();
  tile::await_predecessors();
  Tile t;
  if (!find_tile(t, all.q, blockIdx.y)) return;
  QuantizeParams p = all.q;
  // NOTE: constants here make the code for rows and sums go away, and its registers.
  p.row.enabled = p.row.packed = false, p.a.col_sum = nullptr, p.col.enabled = p.col.packed = true;
  p.col.codes += blockIdx.z * all.out_codes;
  p.a.col_packed.scales += blockIdx.z * all.out_words;
  const Place at;
  uint32_t x[8][4];
  load_values<kFmt>(x, all, t, at, &s.codes[0][0] + 64 * threadIdx.x);
  quantize_patch<__nv_bfloat16, kFmt, false>(p, s, x, t, at);
}

}  // namespace

Status columns_of_stacked(const PackArgs& args) {
  Status status = check_mx(args.operand.element, args.operand.scaling, args.rule);
  if (status == Status::ok) status = check_plain(args.operand);
  if (status != Status::ok) return status;
  if (args.out.layout != Layout::tiles || !is_of_weights(args.operand.element))
    return Status::unsupported;
  const PackTask a = task_of(args);
  const int64_t count = args.groups.count;
  if (a.k_first || count < 0 || count > 65535 || a.rows > 128 * 32768) return Status::bad_argument;
  if (count == 0 || a.rows == 0 || a.k == 0) return Status::ok;
  QuantizeTask q{};
  q.rows = a.rows, q.cols = a.k, q.x_stride = a.k, q.x_dtype = DType::bf16;
  q.element = a.element, q.rule = args.rule, q.spread = a.spread, q.col_packed = a.out;
  RequantizeParams p{};
  status = quantize_params(q, p.q);
  if (status != Status::ok) return status;
  p.codes = a.codes, p.scales = a.scales;
  p.out_codes = a.k * packed_ld(a.rows), p.out_words = packed_scale_words(a.k, a.rows);
  // NOTE: four bytes of nibbles are aligned where eight of bytes would be.
  p.vectors = a.k % 8 == 0 && reinterpret_cast<uintptr_t>(a.codes) % 8 == 0;
  const dim3 grid = tile_grid(p.q, p.q.col_tiles, count);
  return with_weights(a.element, [&]<tile::Fp8 kFmt>() {
    return launch_early(requantize_kernel<kFmt>, {grid, kQuantizeThreads, a.stream}, p);
  });
}

}  // namespace te_mx::sm90
