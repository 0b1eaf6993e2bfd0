// bf16, fp16 or fp32 numbers to NVFP4 by the rules of Transformer Engine, along both directions
// from one read, after a Hadamard transform of 16 and with stochastic rounding where asked: the
// bytes of te_mx/formats/nvfp4.py, whose steps in fp32 these are; or what they stand for, in bf16.
//
// One kernel, launched twice: for the largest magnitudes, then for the codes. A CTA has 128 rows x
// 64 columns, each of its warps 16 rows, so that blocks of both directions are a warp's own: it
// reads rows, a lane 16 adjacent elements of two of them, and columns, a lane two of them, from
// shared memory. Codes of columns of all warps leave together, for whole sectors.
//
// Instances of kParts: rows in groups, or several matrices, whose tiles, blocks and scales begin
// anew with each. Of kBy32: transforms of 32, of which a lane beside has the other half of a row,
// and a warp beside the other half of a column.
#include <algorithm>

#include "common/formats.h"
#include "common/launch.h"
#include "mxtile/sm90/convert.cuh"
#include "nvfp4/nvfp4_operand.cuh"
#include "nvfp4/nvfp4_parts.cuh"
#include "nvfp4/nvfp4_turn.cuh"

namespace te_mx::sm90 {
namespace {

struct Nvfp4Smem {
  Nvfp4Part part;
  float signs[2][32];                            // of transforms: of rows, of columns
  uint32_t largest[2];                           // of all warps
  alignas(16) uint8_t scales[64 * kNvfp4Warps];  // of columns
  // Of a warp: 16 x 64 numbers, their groups of four turned so that rows and columns meet all
  // banks. Then the columns of all.
  alignas(16) float x[kNvfp4Warps][16 * kNvfp4Across];
  // 16 x 64 times 16 random bits. Last: of those that draw none, there is no room.
  alignas(16) uint32_t words[kNvfp4Warps][16 * kNvfp4Across / 2];
};

template <bool kTries, bool kParts, bool kBy32>
__device__ __forceinline__ void quantize_part(const Nvfp4Quantize& q, const Nvfp4Parts& parts,
                                              int64_t tile_at) {
  extern __shared__ __align__(16) uint8_t room[];
  Nvfp4Smem& s = *reinterpret_cast<Nvfp4Smem*>(room);
  const Nvfp4Side &row_to = q.to.row, &col_to = q.to.col;
  const bool to_rows = row_to.codes != nullptr, to_cols = col_to.codes != nullptr;
  const bool square = q.to.square;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < 64) {
    const int64_t signs = threadIdx.x < 32 ? row_to.signs : col_to.signs;
    s.signs[threadIdx.x / 32][lane] = signs >> lane & 1 ? -1.0f : 1.0f;
    if (threadIdx.x < 2) s.largest[threadIdx.x] = 0;
  }
  __syncthreads();
  tile::let_dependents_start();
  tile::await_predecessors();
  const int64_t tiles = (q.to.x.cols + kNvfp4Across - 1) / kNvfp4Across;
  const int64_t cols = q.to.x.cols, col0 = tile_at % tiles * kNvfp4Across;
  Nvfp4Part found{q.to.x.data, tile_at / tiles * kNvfp4Down, 0, q.to.x.rows, 0, 0, 0};
  if constexpr (kParts) {
    if (parts.groups.count > 0 || parts.matrices > 0) {
      if (parts.matrices == 0 && !q.only_amax)
        clear_rows(q, parts.groups, tile_at / tiles * kNvfp4Down, col0);
      if (!find_part(q, parts, tile_at / tiles, found)) return;
    }
    if (threadIdx.x == 0) s.part = found;  // NOTE: there are no registers for it
    __syncthreads();
  }
  const Nvfp4Part& part = kParts ? s.part : found;
  const int64_t row0 = part.down + 16 * warp, rows = part.rows;  // of the part
  const int64_t row_blocks = (cols + 15) / 16, col_blocks = (rows + 15) / 16;
  uint32_t* const row_amax = q.row_amax + (row_to.scale_rows ? part.begin : part.group);
  uint32_t* const col_amax = q.col_amax + part.group;
  // Whether columns are those of the numbers, of which rows told the largest.
  const bool looks_at_cols = to_cols && (!q.only_amax || q.col_amax != q.row_amax || !to_rows);

  // A block transformed by these signs, if there are some, and its largest magnitude.
  const auto look = [&q](float (&v)[16], const float* signs) {
    if (q.only_amax) {
      return signs == nullptr ? largest_finite(v) : largest_turned(v, signs, q.to.x.dtype);
    }
    if (signs != nullptr) turn(v, signs, q.to.x.dtype);
    return largest_of(v);
  };

  // ------------------------------------------------------------------------------------- rows
  const int r = lane / 4, c = lane % 4 * 16;
  const int64_t col = col0 + c;
  float* const x = s.x[warp];
  {
    float v[2][16];
    int count[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int64_t row = row0 + r + 8 * b;
      count[b] = row < rows ? static_cast<int>(max(int64_t{0}, min(int64_t{16}, cols - col))) : 0;
      load_block(q, part.x, row, col, count[b], v[b]);
    }
    if (looks_at_cols) {
      // Groups of four go to 4c + (j ^ turned).
      const int turned = (lane % 4 / 2 * 2) ^ (r & 1);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float4* const to = reinterpret_cast<float4*>(x + (r + 8 * b) * kNvfp4Across + c);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          to[j ^ turned] =
              make_float4(v[b][4 * j], v[b][4 * j + 1], v[b][4 * j + 2], v[b][4 * j + 3]);
      }
    }
    uint32_t largest[2] = {0, 0};
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      if (!to_rows) continue;
      bool turns = row_to.transforms && count[b] == 16;
      if constexpr (kBy32) {
        if (row_to.by_32) {
          turns = turns && (cols - col0) / 32 > c / 32;
          float t[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) t[i] = v[b][i];
          half_turn(t, s.signs[0] + c % 32);
          join_halves(t, lane % 2 == 0, q.to.x.dtype,
                      [&](int i) { return __shfl_xor_sync(~0u, t[i], 1); });
#pragma unroll
          for (int i = 0; i < 16; ++i) v[b][i] = turns ? t[i] : v[b][i];
          turns = false;
        }
      }
      largest[b] = look(v[b], turns ? s.signs[0] + c % 32 : nullptr);
    }
    if (q.only_amax) {
      if (to_rows && row_to.scale_rows) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          largest[b] = max(largest[b], __shfl_xor_sync(~0u, largest[b], 1));
          largest[b] = max(largest[b], __shfl_xor_sync(~0u, largest[b], 2));
          if (lane % 4 == 0 && largest[b] != 0) atomicMax(row_amax + row0 + r + 8 * b, largest[b]);
        }
      } else if (to_rows) {
        const uint32_t most = __reduce_max_sync(~0u, max(largest[0], largest[1]));
        if (lane == 0) atomicMax(&s.largest[0], most);
      }
    } else {
      if (square) {
        uint32_t most = max(largest[0], largest[1]);
#pragma unroll
        for (int other = 4; other < 32; other *= 2)
          most = max(most, __shfl_xor_sync(~0u, most, other));
        largest[0] = largest[1] = most;
      }
      bool four = false;
      if constexpr (kTries) {
        if (square && to_rows) {
          const Nvfp4Whole<kTries> all(row_amax, q.to);
          float2 of = added(misses(v[0], largest[0], all), misses(v[1], largest[0], all));
          for (int other = 16; other > 2; other /= 2) of = shared_misses(of, other);
          four = of.x < of.y;
        }
      }
      const bool random = q.to.seed != nullptr;
      const uint2 key = random ? key_of(q.to.seed) : make_uint2(0, 0);
      Nvfp4Whole<kTries> whole(to_rows ? row_amax : col_amax, q.to);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int64_t row = row0 + r + 8 * b;
        uint4 drawn[2][1];
        if (random) {
          const auto at = static_cast<uint32_t>(q.to.first + part.begin + row);
          draw(drawn[0], at, col, key);
          draw(drawn[1], at, col + 8, key);
          if (to_cols) {
            uint4* const to = reinterpret_cast<uint4*>(s.words[warp] + (r + 8 * b) * 32 + c / 2);
            to[r & 1] = drawn[0][0], to[~r & 1] = drawn[1][0];
          }
        }
        if (!to_rows || count[b] == 0) continue;
        if (row_to.scale_rows) whole = Nvfp4Whole<kTries>(row_amax + row, q.to);
        if (kTries && !square) four = misses_less_by_four(v[b], largest[b], whole);
        const Nvfp4Block block(largest[b], whole, four);
        uint32_t out[8];
        const bool values = row_to.scales == nullptr;
        if (random) {
          const uint32_t words[8] = {drawn[0][0].x, drawn[0][0].y, drawn[0][0].z, drawn[0][0].w,
                                     drawn[1][0].x, drawn[1][0].y, drawn[1][0].z, drawn[1][0].w};
          make_codes<true>(
              out, v[b], block, values, [&](int i) { return words[i / 2]; },
              [](int i) { return half_of(i); });
        } else {
          make_codes<false>(
              out, v[b], block, values, [](int) { return 0u; }, [](int) { return 0u; });
        }
        uint8_t* const to =
            row_to.codes + (part.begin + row) * (values ? 2 * cols : (cols + 1) / 2);
        if (values) {
          put<8>(to + 2 * col, out, 2 * count[b], q.row_words);
        } else {
          put<2>(to + col / 2, out, (count[b] + 1) / 2, q.row_words);
          if (!square || row % 16 == 0)
            row_to.scales[(square ? part.row_blocks + row / 16 : part.begin + row) * row_blocks +
                          col / 16] = static_cast<uint8_t>(block.byte);
        }
        if (col == 0 && (row_to.scale_rows || row == 0))
          row_to.scale[row_to.scale_rows ? part.begin + row : part.group] = whole.decode;
      }
    }
  }

  // ---------------------------------------------------------------------------------- columns
  if (looks_at_cols) {
    if (kBy32 && col_to.by_32) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    const int two = lane;  // columns 2 * two and the one after it
    const int64_t first = col0 + 2 * two;
    float v[2][16];
    const auto take = [two](const float* of, float (&to)[2][16]) {
      const float2* const from = reinterpret_cast<const float2*>(of);
      const int group = two / 2 ^ (two / 16 * 2), half = two % 2;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 pair = from[i * (kNvfp4Across / 2) + 2 * (group ^ (i & 1)) + half];
        to[0][i] = pair.x, to[1][i] = pair.y;
      }
    };
    take(x, v);
    bool turned = !col_to.transforms;
    if constexpr (kBy32) {
      if (col_to.by_32) {
        turned = true;
        if (row0 / 32 * 32 + 32 <= rows) {
          float other[2][16];
          take(s.x[warp ^ 1], other);
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            half_turn(v[b], s.signs[1] + row0 % 32),
                half_turn(other[b], s.signs[1] + (row0 % 32 ^ 16));
            join_halves(v[b], row0 % 32 == 0, q.to.x.dtype, [&](int i) { return other[b][i]; });
          }
        }
      }
    }
    uint32_t largest[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const bool turns = !turned && row0 + 16 <= rows;
      largest[b] = look(v[b], turns ? s.signs[1] + row0 % 32 : nullptr);
    }
    if (q.only_amax) {
      if (col_to.scale_rows) {
#pragma unroll
        for (int b = 0; b < 2; ++b)
          if (largest[b] != 0) atomicMax(col_amax + first + b, largest[b]);
      } else {
        const uint32_t most = __reduce_max_sync(~0u, max(largest[0], largest[1]));
        if (lane == 0) atomicMax(&s.largest[1], most);
      }
    } else {
      if (square) {
        uint32_t most = max(largest[0], largest[1]);
#pragma unroll
        for (int other = 1; other < 8; other *= 2)
          most = max(most, __shfl_xor_sync(~0u, most, other));
        largest[0] = largest[1] = most;
      }
      const bool values = col_to.scales == nullptr;
      Nvfp4Whole<kTries> whole(col_amax, q.to);
      bool four = false;
      if constexpr (kTries) {
        if (square) {
          float2 of[2];
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            of[b] = misses(v[b], largest[b], whole);
            for (int other = 4; other > 0; other /= 2) of[b] = shared_misses(of[b], other);
          }
          const float2 all = added(of[0], of[1]);
          four = all.x < all.y;
        }
      }
      uint32_t out[2][8];
      uint8_t byte[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int64_t mine = min(first + b, cols - 1);
        if (col_to.scale_rows) whole = Nvfp4Whole<kTries>(col_amax + mine, q.to);
        if (kTries && !square) four = misses_less_by_four(v[b], largest[b], whole);
        const Nvfp4Block block(largest[b], whole, four);
        if (q.to.seed != nullptr) {
          const uint32_t* const words = s.words[warp] + two % 4;
          make_codes<true>(
              out[b], v[b], block, values,
              [&](int i) { return words[i * 32 + 4 * (two / 4 ^ (i & 1))]; },
              [&](int) { return half_of(b); });
        } else {
          make_codes<false>(
              out[b], v[b], block, values, [](int) { return 0u; }, [](int) { return 0u; });
        }
        byte[b] = static_cast<uint8_t>(block.byte);
        s.scales[(2 * two + b) * kNvfp4Warps + warp] = byte[b];
        if (row0 == 0 && first + b < cols && (col_to.scale_rows || first + b == 0))
          col_to.scale[col_to.scale_rows ? mine : part.group] = whole.decode;
      }
      if (values || col_to.k_first) {
        // As x lies.
        if (first >= cols) return;
        const bool both = first + 1 < cols;
        if (!values && row0 < rows && !(square && first % 16 != 0)) {
          uint8_t* const to =
              col_to.scales + (part.col_blocks + row0 / 16) * (square ? row_blocks : cols);
#pragma unroll
          for (int b = 0; b < 2; ++b)
            if (b == 0 || (both && !square)) to[square ? first / 16 : first + b] = byte[b];
        }
        const auto there = static_cast<int>(max(int64_t{0}, min(int64_t{16}, rows - row0)));
        const int64_t at = (part.begin + row0) * cols + first;
        if (values) {
          auto* to = reinterpret_cast<uint16_t*>(col_to.codes) + at;
#pragma unroll
          for (int i = 0; i < 16; ++i, to += cols) {
            const uint32_t pair =
                __byte_perm(out[0][i / 2], out[1][i / 2], i % 2 ? 0x7632 : 0x5410);
            if (i >= there) continue;
            if (q.col_words) {
              *reinterpret_cast<uint32_t*>(to) = pair;
            } else {
              to[0] = static_cast<uint16_t>(pair);
              if (both) to[1] = static_cast<uint16_t>(pair >> 16);
            }
          }
        } else {
          uint8_t* to = col_to.codes + at;
#pragma unroll 1
          for (int i = 0; i < there; ++i, to += cols) {
            const int shift = 4 * (i % 8);
            to[0] = static_cast<uint8_t>((i < 8 ? out[0][0] : out[0][1]) >> shift & 15);
            if (both) to[1] = static_cast<uint8_t>((i < 8 ? out[1][0] : out[1][1]) >> shift & 15);
          }
        }
        return;
      }
      __syncthreads();  // nobody reads x any more
      // Columns of codes, 64 bytes each.
      uint8_t* const all = reinterpret_cast<uint8_t*>(s.x);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        uint8_t* const to = all + two * 128 + 16 * (4 * b + warp / 2 ^ (two & 7));
        *reinterpret_cast<uint2*>(to + warp % 2 * 8) = make_uint2(out[b][0], out[b][1]);
      }
      __syncthreads();
      const int64_t down = tile_at / tiles * kNvfp4Down, ld = (rows + 1) / 2;
      {
        const int at = static_cast<int>(threadIdx.x) / 4, part = threadIdx.x % 4;
        const uint8_t* const from = all + at / 2 * 128 + 16 * (4 * (at % 2) + part ^ (at / 2 & 7));
        uint8_t* const to = col_to.codes + (col0 + at) * ld + down / 2 + 16 * part;
        const auto left = static_cast<int>(min(int64_t{16}, ld - down / 2 - 16 * part));
        if (col0 + at < cols && q.col_words && left == 16) {
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else if (col0 + at < cols) {
#pragma unroll 1
          for (int j = 0; j < left; ++j) to[j] = from[j];
        }
      }
      if (threadIdx.x < kNvfp4Across && col0 + threadIdx.x < cols &&
          !(square && threadIdx.x % 16 != 0)) {
        const int64_t mine = col0 + threadIdx.x, start = down / 16;
        uint8_t* const to = col_to.scales + (square ? mine / 16 : mine) * col_blocks + start;
        const uint8_t* const from = s.scales + threadIdx.x * kNvfp4Warps;
        if (col_blocks % kNvfp4Warps == 0 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
          *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
        } else {
          for (int64_t j = 0; j < min(int64_t{kNvfp4Warps}, col_blocks - start); ++j)
            to[j] = from[j];
        }
      }
    }
  }
  if (!q.only_amax) return;
  __syncthreads();
  // Most are not larger than what is there.
  if (threadIdx.x < 2) {
    uint32_t* const amax = threadIdx.x == 0 ? row_amax : col_amax;
    const uint32_t mine = s.largest[threadIdx.x];
    if (mine > __ldcg(amax)) atomicMax(amax, mine);
  }
}

// NOTE: codes begin where magnitudes ended, with what L2 still has.
__device__ __forceinline__ int tile_of(bool only_amax) {
  return static_cast<int>(only_amax ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
}

// The factors of products, where magnitudes are known.
template <bool kTries>
__device__ __forceinline__ void write_factors(const Nvfp4Two& two, int i) {
  const Nvfp4Quantize& q = two.of[i / 2];
  const Nvfp4Side& side = i % 2 == 0 ? q.to.row : q.to.col;
  if (side.factors == nullptr) return;
  const uint32_t* const amax = two.times_amax[i];
  const float times =
      amax == nullptr ? __ldcg(side.times) : Nvfp4Whole<kTries>(amax, two.of[1 - i / 2].to).decode;
  const uint32_t* const own = i % 2 == 0 ? q.row_amax : q.col_amax;
  side.factors[0] = Nvfp4Whole<kTries>(own, q.to).decode * times;
  side.factors[1] = 0.0f, side.factors[2] = 1.0f;
}

template <bool kTries>
__global__ void __launch_bounds__(kNvfp4Threads, 3)
    nvfp4_quantize_tile(const __grid_constant__ Nvfp4Two two) {
  const bool only_amax = two.of[0].only_amax;
  const int at = tile_of(only_amax), which = at < two.first ? 0 : 1;
  quantize_part<kTries, false, false>(two.of[which], Nvfp4Parts{},
                                      which == 0 ? at : at - two.first);
  if (!only_amax && blockIdx.x == 0 && threadIdx.x < 4) write_factors<kTries>(two, threadIdx.x);
}
template <bool kTries, bool kBy32>
__global__ void __launch_bounds__(kNvfp4Threads, kBy32 ? 2 : 3)
    nvfp4_quantize_parts(const __grid_constant__ Nvfp4Quantize q,
                         const __grid_constant__ Nvfp4Parts parts) {
  quantize_part<kTries, true, kBy32>(q, parts, tile_of(q.only_amax));
}

constexpr bool is_wanted(const Nvfp4Side& side) { return side.codes != nullptr; }
// Whether rows start at whole so many bytes.
bool starts_at(const void* at, int64_t row_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(bytes) == 0 &&
         row_bytes % bytes == 0;
}

// Whether the record asks for nothing that this does not make.
Status check(const Nvfp4QuantizeArgs& a, bool parts) {
  const Matrix& x = a.x;
  if (x.rows < 1 || x.cols < 1 || !known(x.dtype) || a.amax == nullptr) return Status::bad_argument;
  for (const Nvfp4Side* side : {&a.row, &a.col})
    if (is_wanted(*side) && side->scale == nullptr) return Status::bad_argument;
  if (!is_wanted(a.row) && !is_wanted(a.col)) return Status::bad_argument;
  if (x.col_stride != 1) return Status::unsupported;
  // Columns of parts lie as x does.
  const bool lies = a.col.scales == nullptr || a.col.k_first;
  return !parts || !is_wanted(a.col) || (lies && !a.col.scale_rows) ? Status::ok
                                                                    : Status::unsupported;
}

// What is as long as a matrix has tensor scales: of rows, and of columns.
struct Words {
  int64_t of_rows, of_cols;
  int64_t bytes() const { return 4 * (of_rows + of_cols); }
};
Words amax_words(const Nvfp4QuantizeArgs& a, int64_t count, int64_t rows) {
  return {a.row.scale_rows ? rows : count, a.col.scale_rows ? a.x.cols : count};
}

// xs: addresses of `count` matrices, or null.
Nvfp4Quantize told(const Nvfp4QuantizeArgs& a, const Words& words, int64_t count,
                   const void* const* xs) {
  const Matrix& x = a.x;
  const auto plain = [](const Nvfp4Side& side) { return !side.transforms && !side.scale_rows; };
  const bool alike = plain(a.row) && plain(a.col);
  const int64_t bytes = x.dtype == DType::f32 ? 4 : 2;
  bool vectors = starts_at(x.data, x.row_stride * bytes, 16);
  for (int64_t i = 0; xs != nullptr && i < count; ++i)
    vectors = vectors && starts_at(xs[i], x.row_stride * bytes, 16);
  return {a,
          a.amax,
          alike ? a.amax : a.amax + words.of_rows,
          vectors,
          true,
          a.row.scales == nullptr ? starts_at(a.row.codes, 2 * x.cols, 16)
                                  : starts_at(a.row.codes, (x.cols + 1) / 2, 8),
          a.col.scales == nullptr ? starts_at(a.col.codes, 2 * x.cols, 4)
                                  : starts_at(a.col.codes, (x.rows + 1) / 2, 16)};
}

constexpr int64_t across(const Matrix& x) { return (x.cols + kNvfp4Across - 1) / kNvfp4Across; }
constexpr int64_t down(const Matrix& x) { return (x.rows + kNvfp4Down - 1) / kNvfp4Down; }
Status clear(void* at, int64_t bytes, void* stream) {
  return started(
      cudaMemsetAsync(at, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
}

Launch launch_of(const Nvfp4QuantizeArgs& a, int64_t tiles, bool only_amax, bool random) {
  const int words = sizeof(Nvfp4Smem::words), all = sizeof(Nvfp4Smem);
  Launch at{dim3(static_cast<unsigned>(tiles)), dim3(kNvfp4Threads), a.execution.stream,
            !only_amax && random ? all : all - words};
  at.early = !only_amax;  // what is before the first one is no kernel
  return at;
}

// One matrix, or two side by side.
Status run(const Nvfp4QuantizeArgs& a, const Nvfp4QuantizeArgs* b) {
  const Nvfp4QuantizeArgs* const args[] = {&a, b};
  Nvfp4Two two{};
  int64_t tiles[2] = {0, 0};
  Words words[2] = {};
  for (int i = 0; i < 2 && args[i] != nullptr; ++i) {
    tiles[i] = across(args[i]->x) * down(args[i]->x);
    words[i] = amax_words(*args[i], 1, args[i]->x.rows);
    two.of[i] = told(*args[i], words[i], 1, nullptr);
  }
  if (tiles[0] + tiles[1] > INT32_MAX) return Status::unsupported;
  two.first = static_cast<int>(tiles[0]);
  for (int i = 0; i < 4; ++i) {
    const Nvfp4Side& side = i % 2 == 0 ? two.of[i / 2].to.row : two.of[i / 2].to.col;
    const Nvfp4Quantize& other = two.of[1 - i / 2];
    if (side.factors == nullptr) continue;
    if (side.times == nullptr || side.scale_rows) return Status::bad_argument;
    if (side.times == other.to.row.scale) two.times_amax[i] = other.row_amax;
    if (side.times == other.to.col.scale) two.times_amax[i] = other.col_amax;
  }
  const bool behind = b != nullptr && b->amax == a.amax + words[0].bytes() / 4;
  Status status =
      clear(a.amax, words[0].bytes() + (behind ? words[1].bytes() : 0), a.execution.stream);
  if (status == Status::ok && b != nullptr && !behind)
    status = clear(b->amax, words[1].bytes(), a.execution.stream);
  const bool tries = a.tries != Nvfp4Tries::none;
  const bool random = a.seed != nullptr || (b != nullptr && b->seed != nullptr);
  for (const bool only_amax : {true, false}) {
    if (status != Status::ok) return status;
    two.of[0].only_amax = two.of[1].only_amax = only_amax;
    status =
        launch_early(!only_amax && tries ? nvfp4_quantize_tile<true> : nvfp4_quantize_tile<false>,
                     launch_of(a, tiles[0] + tiles[1], only_amax, random), two);
  }
  return status;
}

// Of `count` groups or matrices, `matrices` of `rows` rows each: `tiles` of rows a launch.
Status run_parts(const Nvfp4QuantizeArgs& a, int64_t count, Nvfp4Parts& parts,
                 const void* const* xs) {
  const Matrix& x = a.x;
  const bool stack = xs != nullptr;
  const Words words = amax_words(a, count, stack ? count * x.rows : x.rows);
  Nvfp4Quantize q = told(a, words, count, xs);
  if (a.row.factors != nullptr || a.col.factors != nullptr) return Status::bad_argument;
  Status status = clear(a.amax, words.bytes(), a.execution.stream);
  // Scales between groups.
  if (status == Status::ok && a.groups.count > 0 && is_wanted(a.col) && a.col.scales != nullptr)
    status = clear(a.col.scales, (x.rows / 16 + count) * x.cols, a.execution.stream);
  if (status != Status::ok) return status;
  const bool tries = a.tries != Nvfp4Tries::none, by_32 = a.row.by_32 || a.col.by_32;
  for (const bool only_amax : {true, false}) {
    q.only_amax = only_amax;
    for (int64_t first = 0; first < (stack ? count : 1); first += kMostMatrices) {
      int64_t tiles = across(x) * down(x);
      if (stack) {
        parts.first = static_cast<int>(first);
        parts.matrices = static_cast<int>(std::min<int64_t>(count - first, kMostMatrices));
        std::copy_n(xs + first, parts.matrices, parts.xs);
        tiles *= parts.matrices;
      } else if (a.groups.count > 0) {
        tiles = across(x) * group_tiles(x.rows, count);
      }
      if (tiles > INT32_MAX) return Status::unsupported;
      Launch at = launch_of(a, tiles, only_amax, a.seed != nullptr);
      at.early = !only_amax || first > 0;
      status = launch_early(!only_amax && tries ? nvfp4_quantize_parts<true, true>
                            : by_32             ? nvfp4_quantize_parts<false, true>
                                                : nvfp4_quantize_parts<false, false>,
                            at, q, parts);
      if (status != Status::ok) return status;
    }
  }
  return status;
}

}  // namespace

Status nvfp4_quantize(const Nvfp4QuantizeArgs& a) {
  if (a.x.data == nullptr) return Status::bad_argument;
  const bool groups = a.groups.count > 0;
  const Status status = check(a, groups);
  if (status != Status::ok) return status;
  if (groups && (a.square || !valid(a.groups) || a.groups.rows != a.x.rows))
    return Status::bad_argument;
  if (!groups && !a.row.by_32 && !a.col.by_32) return run(a, nullptr);
  Nvfp4Parts parts{};
  if (groups) parts.groups = group_table(a.groups);
  return run_parts(a, groups ? a.groups.count : 1, parts, nullptr);
}

Status nvfp4_quantize_two(const Nvfp4QuantizeArgs& first, const Nvfp4QuantizeArgs& second) {
  for (const Nvfp4QuantizeArgs* a : {&first, &second}) {
    if (a->x.data == nullptr || a->groups.count > 0) return Status::bad_argument;
    const Status status = check(*a, false);
    if (status != Status::ok) return status;
    if (a->row.by_32 || a->col.by_32) return Status::unsupported;
  }
  const bool tries[] = {first.tries != Nvfp4Tries::none, second.tries != Nvfp4Tries::none};
  return tries[0] == tries[1] ? run(first, &second) : Status::unsupported;
}

Status nvfp4_quantize_stacked(const Nvfp4QuantizeArgs& a, const void* const* xs, int64_t count) {
  const Status status = check(a, true);
  if (status != Status::ok) return status;
  if (a.seed != nullptr || a.groups.count > 0 || count < 1 || count * a.x.rows > INT32_MAX)
    return Status::bad_argument;
  Nvfp4Parts parts{};
  return run_parts(a, count, parts, xs);
}

}  // namespace te_mx::sm90
