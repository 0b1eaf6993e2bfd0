#include "common/transpose.h"

#include <cstring>
#include <initializer_list>

#include "common/parallel.h"
#include "mxtile/simd/turn_bytes.hpp"

namespace te_mx::cpu {
namespace {

constexpr int64_t kTile = 64;  // rows and columns of a tile: both sides touch whole cache lines
constexpr int64_t kEight = 8, kSixteen = 16;
constexpr int64_t kItemRows = 4096;

// Exchanges the bits of a and b that lie `shift` apart under mask: one step of a transpose.
void exchange(uint64_t& a, uint64_t& b, int shift, uint64_t mask) {
  const uint64_t difference = (a >> shift ^ b) & mask;
  a ^= difference << shift;
  b ^= difference;
}

// Eight rows of eight bytes, turned in registers.
void turn_eight(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride) {
  uint64_t x[kEight];
  for (int i = 0; i < kEight; ++i) std::memcpy(&x[i], in + i * in_stride, kEight);
  for (int i = 0; i < 4; ++i) exchange(x[i], x[i + 4], 32, 0x00000000FFFFFFFF);
  for (int i : {0, 1, 4, 5}) exchange(x[i], x[i + 2], 16, 0x0000FFFF0000FFFF);
  for (int i : {0, 2, 4, 6}) exchange(x[i], x[i + 1], 8, 0x00FF00FF00FF00FF);
  for (int i = 0; i < kEight; ++i) std::memcpy(out + i * out_stride, &x[i], kEight);
}

void turn_tile(const uint8_t* in, int64_t in_stride, int64_t rows, int64_t cols, uint8_t* out,
               int64_t out_stride) {
#if defined(MXTILE_TURNS_BYTES)
  if (rows >= kSixteen && cols >= kEight) {
    for (int64_t r = 0; r < rows; r += kSixteen) {
      const int64_t i = r + kSixteen <= rows ? r : rows - kSixteen;  // the last ones once more
      for (int64_t c = 0; c < cols; c += kEight) {
        const int64_t j = c + kEight <= cols ? c : cols - kEight;
        mxtile::simd::turn_bytes_16x8(in + i * in_stride + j, in_stride, out + j * out_stride + i,
                                      out_stride);
      }
    }
    return;
  }
#endif
  if (rows >= kEight && cols >= kEight) {
    for (int64_t r = 0; r < rows; r += kEight) {
      const int64_t i = r + kEight <= rows ? r : rows - kEight;
      for (int64_t c = 0; c < cols; c += kEight) {
        const int64_t j = c + kEight <= cols ? c : cols - kEight;
        turn_eight(in + i * in_stride + j, in_stride, out + j * out_stride + i, out_stride);
      }
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) out[j * out_stride + i] = in[i * in_stride + j];
  }
}

// By way of copies: lines a power of two apart share so few cache sets that a line would be gone
// when its next bytes come.
void turn_by_copies(const uint8_t* in, int64_t in_stride, int64_t rows, int64_t cols, uint8_t* out,
                    int64_t out_stride) {
  alignas(64) uint8_t lines[kTile * kTile], turned[kTile * kTile];
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(lines + r * kTile, in + r * in_stride, static_cast<size_t>(cols));
  }
  turn_tile(lines, kTile, rows, cols, turned, kTile);
  for (int64_t c = 0; c < cols; ++c) {
    std::memcpy(out + c * out_stride, turned + c * kTile, static_cast<size_t>(rows));
  }
}

}  // namespace

void transpose_bytes(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, int threads) {
  const int64_t strips = (cols + kTile - 1) / kTile;
  const int64_t parts = (rows + kItemRows - 1) / kItemRows;
  parallel_for(threads, strips * parts, [&](int64_t item) {
    const int64_t c = item % strips * kTile;
    const int64_t width = cols - c < kTile ? cols - c : kTile;
    const int64_t first = item / strips * kItemRows;
    const int64_t end = rows - first < kItemRows ? rows : first + kItemRows;
    for (int64_t r = first; r < end; r += kTile) {
      const int64_t height = end - r < kTile ? end - r : kTile;
      const uint8_t* from = in + r * cols + c;
      uint8_t* to = out + c * rows + r;
      if (width >= kSixteen && height == kTile) {
        turn_by_copies(from, cols, height, width, to, rows);
      } else {
        turn_tile(from, cols, height, width, to, rows);
      }
    }
  });
}

}  // namespace te_mx::cpu
