// What the two bf16 streams share. A stream multiplies a few rows of lhs (M <= 16) with rhs codes
// read as they lie; rhs is read once, so its bytes are the cost.
#pragma once

#include "common/isa.h"
#include "common/parallel.h"
#include "gemm/gemm_internal.hpp"
#include "gemm/pack_bf16.hpp"
#include "gemm/values.hpp"

namespace te_mx::cpu {

// One a byte or two, those of MX; and of NVFP4. Bytes of a line of 64.
enum class Codes : int { bytes, nibbles, small };
constexpr int64_t line_bytes(Codes kind) { return kind == Codes::bytes ? 64 : 32; }

// Rows of rhs that one thread takes at a time: consecutive, so that prefetches land in the core
// that uses them.
static inline int64_t stream_item_rows(int64_t n, int threads, int64_t step, int64_t most) {
  const int64_t fair = n / (8 * (threads > 1 ? threads : 1)) / step * step;
  return fair < step ? step : fair > most ? most : fair;
}

// The codes of a row from k on, fewer than 64, as they lie, and zeros up to a whole line.
static inline void copy_last_line(const StridedOperand& o, int64_t row, int64_t k,
                                  uint8_t* padded) {
  std::memset(padded, 0, 64);
  const int64_t left = o.k - k;
  std::memcpy(padded, o.at(row, k), static_cast<size_t>(o.nibbles ? left / 2 : left));
  if (o.nibbles && left % 2 == 1) padded[left / 2] = o.code(row, o.k - 1);
}

// The scales of a line of NVFP4 that the end of its row cuts, and zeros.
static inline void copy_last_scales(const StridedOperand& o, int64_t row, int64_t k,
                                    uint8_t* scales) {
  std::memset(scales, 0, 4);
  std::memcpy(scales, o.small_scale(row, k / kSmallBlock),
              static_cast<size_t>(ceil_div(o.k - k, kSmallBlock)));
}

// Calls put(row, block, words of its 32 k) for every block of rows of lhs that is given as bf16 or
// in NVFP4, up to a whole line.
template <class Decoder, class Put>
Status put_values(const StridedOperand& x, const float* exponents, int threads, const Put& put) {
  if (!x.e4m3 && x.values.dtype != DType::bf16) return Status::unsupported;
  constexpr int64_t kBlocks = 32, kInline = 1600;  // of an item; not worth waking a team
  const int64_t blocks = round_up(ceil_div(x.k, kBlock), 2);
  parallel_for(x.rows * blocks < kInline ? 1 : threads, ceil_div(blocks, kBlocks),
               [&](int64_t item) {
                 alignas(64) uint16_t words[kBlocks * kBlock];
                 const int64_t begin = item * kBlocks, left = blocks - begin;
                 const int64_t count = left < kBlocks ? left : kBlocks;
                 for (int64_t r = 0; r < x.rows; ++r) {
                   if (x.e4m3) {
                     for (int64_t b = 0; b < count; ++b) {
                       small_words<Decoder>(x, r, (begin + b) * kBlock, words + b * kBlock);
                     }
                   } else {
                     relative_words(x, r, begin * kBlock, count * kBlock, exponents[r], words);
                   }
                   for (int64_t b = 0; b < count; ++b) put(r, begin + b, words + b * kBlock);
                 }
               });
  return Status::ok;
}

}  // namespace te_mx::cpu
