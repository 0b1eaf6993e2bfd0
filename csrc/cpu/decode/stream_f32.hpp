// The fp32 stream kernel for few rows of lhs (M <= 16), written once over the f32 vector words S:
// rhs codes are read as they lie, once, and decoded into L1 a strip of kStripRows x kStripK at a
// time.
//
// lhs is packed as [M][K up to 32], values relative to its row exponents. Lane l of the sum of one
// element adds k = l, l + lanes, l + 2 lanes, ... in that order; the lanes are added last, in
// halves. Factors are multiplied into the values, which fp32 rounds.
#pragma once

#include "common/isa.h"
#include "common/parallel.h"
#include "gemm/gemm_internal.hpp"
#include "gemm/pack_f32.hpp"
#include "gemm/values.hpp"
#include "mxtile/simd/transpose.hpp"

namespace te_mx::cpu::f32 {

template <class S>
struct StreamGemm {
  static constexpr int kTaskCols = 32;  // rows of rhs, so columns of D, of one item
  static constexpr int kStripRows = 4;  // rows of rhs decoded together
  static constexpr int kStripK = 256;
  static constexpr int kGroup = S::kLanes;  // rows of rhs whose sums are added up together
  // Rows of lhs that share a load of decoded values: what 32 or 16 vector registers hold.
  static constexpr int kLhsRows = S::kLanes == 16 ? 4 : 2;
  using F = typename S::F;

  template <class Run>
  static void with_element(Element element, const Run& run) {
    switch (element) {
      case Element::e4m3:
        return run(mxtile::mx::E4M3{});
      case Element::e5m2:
        return run(mxtile::mx::E5M2{});
      case Element::e4m3fnuz:
        return run(mxtile::mx::E4M3FNUZ{});
      case Element::e2m1:
        return run(mxtile::mx::E2M1{});
      default:
        return run(mxtile::mx::E5M2FNUZ{});
    }
  }

  static int64_t panel_bytes(Role role, int64_t rows, int64_t k) {
    return role == Role::lhs ? rows * round_up(k, kBlock) * 4 : 0;
  }

  // What the codes of a block are multiplied by.
  static float scale_of(const StridedOperand& o, const float* exponents, int64_t row, int64_t k) {
    const uint8_t byte = o.scales[row * o.scale_row_stride + k / kBlock * o.scale_block_stride];
    const float power = row_factor(byte, exponents[row]);
    return o.factors == nullptr ? power : power * o.factors[k / kWideBlock * o.factor_stride + row];
  }

  // Codes of a block of 32.
  template <class E>
  [[gnu::always_inline]] static void decode_part(const StridedOperand& o, const float* exponents,
                                                 const uint8_t* codes, int n, int64_t row,
                                                 int64_t k, float* out) {
    if (o.e4m3) {
      decode_small<S, E>(o, codes, n, row, k, out);
    } else {
      decode_block<S, E>(codes, n, scale_of(o, exponents, row, k), out);
    }
  }

  template <class E>
  static void pack_rows(const StridedOperand& o, const float* exponents, float* panel,
                        int threads) {
    const int64_t K = round_up(o.k, kBlock);
    parallel_for(threads, o.rows, [&](int64_t row) {
      for (int64_t k = 0; k < o.k; k += kBlock) {
        const int n = static_cast<int>(o.k - k < kBlock ? o.k - k : kBlock);
        uint8_t room[kBlock];
        const uint8_t* codes = room;
        if (o.code_k_stride == 1) {
          codes = codes_of<kBlock>(o, row, k, n, room);
        } else {
          for (int i = 0; i < n; ++i) room[i] = o.code(row, k + i);
        }
        decode_part<E>(o, exponents, codes, n, row, k, panel + row * K + k);
      }
    });
  }

  // In the order of decoded blocks, which is that of every element.
  static void pack_values(const StridedOperand& o, const float* exponents, float* panel,
                          int threads) {
    constexpr int64_t kPart = 1024;
    const int64_t K = round_up(o.k, kBlock);
    parallel_for(o.rows * K < kPart * 32 ? 1 : threads, o.rows, [&](int64_t row) {
      float part[kPart];
      for (int64_t k = 0; k < K; k += kPart) {
        const int64_t count = K - k < kPart ? K - k : kPart;
        relative_floats(o, row, k, count, exponents[row], part);
        float* out = panel + row * K + k;
        for (int64_t b = 0; b < count; b += kBlock) {
          for (int i = 0; i < kBlock; ++i) {
            out[b + i] = part[b + mxtile::simd::BlockDecoder<S, mxtile::mx::E4M3>::element(i)];
          }
        }
      }
    });
  }

  static Status pack(Role role, const StridedOperand& operand, const float* exponents, void* panels,
                     int threads) {
    if (role != Role::lhs) return Status::ok;
    float* panel = static_cast<float*>(panels);
    if (operand.as_values()) {
      pack_values(operand, exponents, panel, threads);
      return Status::ok;
    }
    with_element(operand.element, [&](auto element) {
      pack_rows<decltype(element)>(operand, exponents, panel, threads);
    });
    return Status::ok;
  }

  // strip[kStripRows][kStripK] = rhs[row0.., k0..], zero past the end of either.
  template <class E>
  static void decode_strip(const StridedOperand& o, const float* exponents, int64_t row0,
                           int64_t k0, float* strip) {
    const int64_t k1 = o.k < k0 + kStripK ? o.k : k0 + kStripK;
    for (int r = 0; r < kStripRows; ++r) {
      float* out = strip + r * kStripK;
      const int64_t row = row0 + r;
      if (row >= o.rows) {
        for (int64_t k = k0; k < k1; k += kBlock) {
          for (int i = 0; i < kBlock; ++i) out[k - k0 + i] = 0.0f;
        }
        continue;
      }
      for (int64_t k = k0; k < k1; k += kBlock) {
        const int n = static_cast<int>(k1 - k < kBlock ? k1 - k : kBlock);
        uint8_t room[kBlock];
        decode_part<E>(o, exponents, codes_of<kBlock>(o, row, k, n, room), n, row, k, out + k - k0);
      }
    }
  }

  // sums[Rows at stride kSpan][kStripRows][lanes] += lhs[Rows][n at stride ld] *
  // strip[kStripRows][n], from 0 on when first
  static constexpr int kSpan = kGroup * S::kLanes;
  static_assert(kGroup % kStripRows == 0 && kTaskCols % kGroup == 0);
  template <int Rows>
  static void dot_strip(const float* lhs, int64_t ld, const float* strip, int64_t n, bool first,
                        float* sums) {
    F sum[Rows][kStripRows];
    for (int i = 0; i < Rows; ++i) {
      for (int r = 0; r < kStripRows; ++r) {
        sum[i][r] = first ? S::set(0.0f) : S::load(sums + i * kSpan + r * S::kLanes);
      }
    }
    for (int64_t k = 0; k < n; k += S::kLanes) {
      F w[kStripRows];
      for (int r = 0; r < kStripRows; ++r) w[r] = S::load(strip + r * kStripK + k);
      for (int i = 0; i < Rows; ++i) {
        const F x = S::load(lhs + i * ld + k);
        for (int r = 0; r < kStripRows; ++r) sum[i][r] = S::fma(x, w[r], sum[i][r]);
      }
    }
    for (int i = 0; i < Rows; ++i) {
      for (int r = 0; r < kStripRows; ++r) S::store(sums + i * kSpan + r * S::kLanes, sum[i][r]);
    }
  }

  static float add_lanes(float* lanes) {
    for (int width = S::kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
  }

  // acc[M][kTaskCols] = sums of D[:, n0 .. n0 + cols)
  template <class E>
  static void task(const GemmTask& args, const float* lhs, const float* rhs_exp, int64_t n0,
                   int cols, float* acc) {
    const int M = static_cast<int>(args.lhs.rows);
    const int64_t K = round_up(args.lhs.k, kBlock);
    alignas(64) float strip[kStripRows * kStripK];
    alignas(64) float sums[kStreamMaxRows * kSpan];
    for (int c = 0; c < cols; c += kGroup) {
      if (cols - c <= kGroup - kStripRows) {  // strips without a column
        for (int i = 0; i < M * kSpan; ++i) sums[i] = 0.0f;
      }
      for (int64_t k = 0; k < K; k += kStripK) {  // so that this part of lhs stays in L1
        const int64_t n = K - k < kStripK ? K - k : kStripK;
        for (int r = 0; r < kGroup && c + r < cols; r += kStripRows) {
          decode_strip<E>(args.rhs, rhs_exp, n0 + c + r, k, strip);
          float* to = sums + r * S::kLanes;
          int m = 0;
          for (; m + kLhsRows <= M; m += kLhsRows) {
            dot_strip<kLhsRows>(lhs + m * K + k, K, strip, n, k == 0, to + m * kSpan);
          }
          for (; m < M; ++m) dot_strip<1>(lhs + m * K + k, K, strip, n, k == 0, to + m * kSpan);
        }
      }
      for (int m = 0; m < M; ++m) {
        F rows[kGroup];
        for (int r = 0; r < kGroup; ++r) rows[r] = S::load(sums + m * kSpan + r * S::kLanes);
        S::store(acc + m * kTaskCols + c, mxtile::simd::row_sums<S>(rows));
      }
    }
  }

  static Status run(const Range& range, const void* lhs_panels, const void*,
                    const EpilogueContext& context, void*) {
    const GemmTask& args = *context.args;
    if (args.lhs.rows > kStreamMaxRows || args.rhs.code_k_stride != 1) return Status::unsupported;
    const float* lhs = static_cast<const float*>(lhs_panels);
    const EpilogueFn epilogue = epilogue_for(isa_native());
    parallel_for(args.threads, ceil_div(range.n1 - range.n0, kTaskCols), [&](int64_t item) {
      const int64_t n0 = range.n0 + item * kTaskCols;
      const int cols = static_cast<int>(range.n1 - n0 < kTaskCols ? range.n1 - n0 : kTaskCols);
      alignas(64) float acc[kStreamMaxRows * kTaskCols];
      with_element(args.rhs.element, [&](auto element) {
        task<decltype(element)>(args, lhs, context.rhs_exp, n0, cols, acc);
      });
      epilogue(context, acc, kTaskCols, 0, n0, static_cast<int>(args.lhs.rows), cols);
    });
    return Status::ok;
  }

  static void row_sums(const StridedOperand& lhs, const void* lhs_panels, const float* lhs_exp,
                       float* out, int) {
    const int64_t K = round_up(lhs.k, kBlock);
    for (int64_t row = 0; row < lhs.rows; ++row) {
      const float* x = static_cast<const float*>(lhs_panels) + row * K;
      F sum = S::set(0.0f);
      for (int64_t k = 0; k < K; k += S::kLanes) sum = S::add(sum, S::load(x + k));
      alignas(64) float lanes[S::kLanes];
      S::store(lanes, sum);
      const auto exponent = S::iset(static_cast<int32_t>(lhs_exp[row]));
      S::store_part(out + row, S::scale2(S::set(add_lanes(lanes)), exponent), 1);
    }
  }

  static const KernelImpl* impl() {
    static constexpr KernelImpl kImpl = {panel_bytes, pack, nullptr, run, row_sums};
    return &kImpl;
  }
};

}  // namespace te_mx::cpu::f32
