#include "common/transpose.h"

#include <cstring>
#include <initializer_list>

#include "common/parallel.h"

namespace te_mx::cpu {
namespace {

constexpr int64_t kTile = 64;  // rows and columns of a tile: both sides touch whole cache lines
constexpr int64_t kEight = 8;

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
  for (int64_t r = 0; r < rows; r += kEight) {
    for (int64_t c = 0; c < cols; c += kEight) {
      if (r + kEight <= rows && c + kEight <= cols) {
        turn_eight(in + r * in_stride + c, in_stride, out + c * out_stride + r, out_stride);
        continue;
      }
      for (int64_t i = r; i < rows && i < r + kEight; ++i) {
        for (int64_t j = c; j < cols && j < c + kEight; ++j) {
          out[j * out_stride + i] = in[i * in_stride + j];
        }
      }
    }
  }
}

}  // namespace

void transpose_bytes(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, int threads) {
  const int64_t strips = (cols + kTile - 1) / kTile;
  parallel_for(threads, strips, [&](int64_t strip) {
    const int64_t c = strip * kTile;
    const int64_t width = cols - c < kTile ? cols - c : kTile;
    for (int64_t r = 0; r < rows; r += kTile) {
      const int64_t height = rows - r < kTile ? rows - r : kTile;
      turn_tile(in + r * cols + c, cols, height, width, out + c * rows + r, rows);
    }
  });
}

}  // namespace te_mx::cpu
