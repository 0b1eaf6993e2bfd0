// How fast the CPU multiplies when nothing has to be fetched: one function a level, each in a file
// with that level's flags.
#pragma once

#include <cstdint>

namespace te_mx::cpu {

// Runs `rounds` rounds of products on registers; returns the floating-point operations of a round.
// The sum goes to *sink, so that no product can be left out.
using PeakFn = int64_t (*)(int64_t rounds, float* sink);

int64_t peak_amx(int64_t rounds, float* sink);
int64_t peak_avx512_bf16(int64_t rounds, float* sink);
int64_t peak_avx512(int64_t rounds, float* sink);
int64_t peak_avx2(int64_t rounds, float* sink);
int64_t peak_portable(int64_t rounds, float* sink);

}  // namespace te_mx::cpu
