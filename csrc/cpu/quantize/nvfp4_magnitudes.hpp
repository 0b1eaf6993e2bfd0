// Tiles of NVFP4 as fp32 patterns, transformed where that is asked for, and their largest
// magnitudes. Part of nvfp4_loops.hpp.
#pragma once

#include <cstring>

#include "common/room.h"
#include "mxtile/mx/round.hpp"
#include "mxtile/quant/stochastic.hpp"
#include "mxtile/simd/convert.hpp"
#include "quantize/nvfp4.hpp"

namespace te_mx::cpu::nvfp4 {
namespace {

namespace mx = mxtile::mx;

constexpr int kB = static_cast<int>(kSmallBlock);
constexpr uint32_t kMagnitude = 0x7FFFFFFF;
using Values = uint32_t[kRows][kCols];  // fp32 patterns

template <class S>
MXTILE_WORD typename S::I larger(typename S::I a, typename S::I b) {
  return S::select_gt(a, b, a, b);
}

template <class S>
MXTILE_WORD typename S::I magnitude(const uint32_t* x) {
  typename S::I bits;
  std::memcpy(&bits, x, sizeof bits);
  return S::iand(bits, S::iset(static_cast<int32_t>(kMagnitude)));
}

template <class T, bool kF16>
void load_as(const Tile& tile, Values& out) {
  const T* x = static_cast<const T*>(tile.x);
  const auto bits = [](T v) -> uint32_t {
    if constexpr (sizeof(T) == 4) return v;
    return kF16 ? mx::f16_to_f32(static_cast<uint16_t>(v)) : static_cast<uint32_t>(v) << 16;
  };
  for (int r = 0; r < kRows; ++r) {
    const int n = r < tile.rows ? tile.cols : 0;
    const T* from = x + r * tile.row_stride;
    if (n == kCols && tile.col_stride == 1) {
      // The tile to the right comes next.
      for (int c = kCols; c < 2 * kCols; c += static_cast<int>(64 / sizeof(T))) {
        __builtin_prefetch(from + c, 0, 2);
      }
      for (int c = 0; c < kCols; ++c) out[r][c] = bits(from[c]);
    } else {
      for (int c = 0; c < n; ++c) out[r][c] = bits(from[c * tile.col_stride]);
      std::memset(out[r] + n, 0, static_cast<size_t>(kCols - n) * 4);
    }
  }
}

inline Tile other_of(Tile t) {
  t.x = t.other;
  return t;
}

// Zeros outside of the matrix.
void load(const Tile& tile, Values& out) {
  if (tile.dtype == DType::f32) return load_as<uint32_t, false>(tile, out);
  if (tile.dtype == DType::bf16) return load_as<uint16_t, false>(tile, out);
  load_as<uint16_t, true>(tile, out);
}

inline uint32_t finite(uint32_t bits) {
  const uint32_t a = bits & kMagnitude;
  return a < mx::kF32Inf ? a : 0;
}

// Of a row whose elements are adjacent. Magnitudes are ordered as their bits are.
template <class T, class I>
inline uint32_t row_largest(const void* x, int n, I inf) {
  constexpr I kAll = static_cast<I>(static_cast<T>(~T{0}) >> 1);
  const T* from = static_cast<const T*>(x);
  I most = 0;
  for (int i = 0; i < n; ++i) {
    const I a = static_cast<I>(static_cast<I>(from[i]) & kAll);
    const I number = a < inf ? a : I{0};
    most = number > most ? number : most;
  }
  return static_cast<uint32_t>(most);
}

// What is transformed is rounded to the dtype of the matrix.
inline void round_to(DType dtype, uint32_t* x, int n) {
  for (int i = 0; dtype == DType::bf16 && i < n; ++i) {
    const bool nan = (x[i] & kMagnitude) > mx::kF32Inf;
    x[i] = nan ? x[i] : (x[i] + 0x7FFF + (x[i] >> 16 & 1)) & 0xFFFF0000;
  }
  for (int i = 0; dtype == DType::f16 && i < n; ++i) x[i] = mx::f16_to_f32(mx::f32_to_f16(x[i]));
}

// The sums of 16 rows of a vector of columns.
template <class S>
MXTILE_WORD void add_up(const Values& x, int c, uint32_t signs, typename S::F (&v)[kRows]) {
  for (int r = 0; r < kRows; ++r) {
    const auto sign = S::set(signs >> r & 1 ? -1.0f : 1.0f);
    v[r] = S::mul(S::load(reinterpret_cast<const float*>(x[r]) + c), sign);
  }
#pragma GCC unroll 4
  for (int h = 1; h < kRows; h *= 2) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      if (r & h) continue;
      const auto low = v[r], high = v[r + h];
      v[r] = S::add(low, high), v[r + h] = S::sub(low, high);
    }
  }
}

// Transformed columns, a vector of them at a time: body(c, rows) has 16 rows of those from c on. Of
// 32 rows the other half is read, too.
template <class S, class Body>
MXTILE_WORD void turn_columns(const Tile& t, const Values& x, const Body& body) {
  const InRoom<Values> room;
  const bool halves = t.col_transform == 2 * kRows;
  if (halves) load(other_of(t), *room);
  const auto factor = S::set(halves ? mx::as_float(0x3E3504F3u) : 0.25f);
  for (int c = 0; c < kCols; c += S::kLanes) {
    typename S::F v[kRows];
    add_up<S>(x, c, t.col_signs, v);
    if (halves) {
      typename S::F rest[kRows];
      add_up<S>(*room, c, t.other_signs, rest);
      for (int r = 0; r < kRows; ++r) {
        v[r] = t.upper ? S::sub(rest[r], v[r]) : S::add(v[r], rest[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      v[r] = S::mul(v[r], factor);
      if (t.dtype == DType::bf16) {
        // NaN stays what it is: its block says so.
        v[r] = S::as_float(S::iand(mxtile::simd::bf16_high<S>(v[r]), S::iset(~0xFFFF)));
      } else if (t.dtype == DType::f16) {
        alignas(64) uint16_t half[S::kLanes];
        S::store_f16(half, v[r]);
        v[r] = S::load_f16(half);
      }
    }
    body(c, v);
  }
}

template <class S>
void transform(const Tile& t, Of of, const Values& x, Values& out) {
  if (of == Of::col_chunks) {
    turn_columns<S>(t, x, [&](int c, const auto& v) {
      for (int r = 0; r < kRows; ++r) S::store(reinterpret_cast<float*>(out[r]) + c, v[r]);
    });
    return;
  }
  std::memcpy(out, x, sizeof out);
  for (int r = 0; r < t.rows; ++r) {
    for (int c = 0; c + t.row_transform <= t.cols; c += t.row_transform) {
      if (t.row_transform == kB) {
        mxtile::quant::hadamard<kB, 1>(out[r] + c, t.row_signs >> (c % 32));
      } else {
        mxtile::quant::hadamard<2 * kB, 1>(out[r] + c, t.row_signs);
      }
      round_to(t.dtype, out[r] + c, t.row_transform);
    }
  }
}

template <class S>
void raise(const Tile& tile, Of of, uint32_t* largest, int64_t rows, int64_t cols) {
  if (of == Of::elements && cols == 0 && tile.col_stride == 1 && tile.dtype != DType::f16) {
    const int64_t bytes = tile.dtype == DType::f32 ? 4 : 2;
    for (int r = 0; r < tile.rows; ++r) {
      const char* x = static_cast<const char*>(tile.x) + r * tile.row_stride * bytes;
      const uint32_t found = bytes == 4
                                 ? row_largest<uint32_t, int32_t>(x, tile.cols, 0x7F800000)
                                 : row_largest<uint16_t, int16_t>(x, tile.cols, 0x7F80) << 16;
      uint32_t& to = largest[r * rows];
      to = found > to ? found : to;
    }
    return;
  }
  struct Both {
    alignas(64) Values x, transformed;
  };
  const InRoom<Both> room;
  load(tile, room->x);
  const auto raise_to = [](uint32_t& to, uint32_t a) { to = a > to ? a : to; };
  const bool by_cols = of == Of::col_chunks && tile.col_transform != 0;
  if (by_cols && rows == 0 && cols == 0) {
    const auto inf = S::iset(0x7F800000), zero = S::iset(0);
    auto most = zero;
    turn_columns<S>(tile, room->x, [&](int, const auto& v) {
      for (int r = 0; r < kRows; ++r) {
        const auto a = S::iand(S::as_int(v[r]), S::iset(static_cast<int32_t>(kMagnitude)));
        most = larger<S>(most, S::select_gt(inf, a, a, zero));
      }
    });
    alignas(64) float lanes[S::kLanes];
    S::store(lanes, S::as_float(most));
    for (int i = 0; i < S::kLanes; ++i) raise_to(*largest, mx::as_bits(lanes[i]));
    return;
  }
  const bool transforms = by_cols || (of == Of::row_chunks && tile.row_transform != 0);
  if (transforms) transform<S>(tile, of, room->x, room->transformed);
  const Values& x = transforms ? room->transformed : room->x;
  for (int r = 0; r < tile.rows; ++r) {
    uint32_t* const to = largest + r * rows;
    for (int c = 0; cols != 0 && c < tile.cols; ++c) raise_to(to[c * cols], finite(x[r][c]));
    if (cols != 0) continue;
    int32_t most = 0;  // NOTE: one in memory would be read again after every element.
    for (int c = 0; c < kCols; ++c) {
      const auto a = static_cast<int32_t>(finite(x[r][c]));
      most = a > most ? a : most;
    }
    raise_to(*to, static_cast<uint32_t>(most));
  }
}

}  // namespace
}  // namespace te_mx::cpu::nvfp4
