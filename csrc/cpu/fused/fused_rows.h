// Row kernels of the fused steps, built for each instruction set.
#pragma once

#include <cstdint>

#include "te_mx/fused.h"

namespace te_mx::cpu {

struct RowKernels {
  // Sums of a row: mean (0 with rms) and rstd.
  void (*stats)(const NormArgs& args, int64_t row, float* mean, float* rstd);
  // Elements [c, c + n) of a row, normalized, to out in z_dtype. n <= kFusedCols.
  void (*normalize)(const NormArgs& args, int64_t row, float mean, float rstd, int64_t c, int n,
                    void* out);
  // One row of dx; dz * h and dz are added to dweight and dbias (if not null). v and h: [cols
  // rounded up to kNormLanes] of scratch.
  void (*normalize_backward)(const NormGradArgs& args, int64_t row, float* dweight, float* dbias,
                             float* v, float* h);
  // Elements [c, c + n) of the activation, or of the gradients of both halves; out_gate is null
  // unless backward and gated.
  void (*activate)(const ActArgs& args, int64_t row, int64_t c, int n, void* out, void* out_gate);
};

inline constexpr int kFusedCols = 256;

// Columns of the activated values. static: the files of every instruction set call it.
static inline int64_t act_cols(const ActArgs& args) {
  return args.gated ? args.h.cols / 2 : args.h.cols;
}

const RowKernels& row_kernels();  // for isa_native()

const RowKernels& row_kernels_portable();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

}  // namespace te_mx::cpu
