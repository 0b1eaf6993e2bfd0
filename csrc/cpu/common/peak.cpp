// The measured limit that benchmarks are held against.
#include "common/peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "common/isa.h"
#include "common/parallel.h"

namespace te_mx::cpu {
namespace {

PeakFn peak_for(Isa level) {
  switch (level) {
#ifdef TE_MX_HAVE_AMX
    case Isa::amx:
      return peak_amx;
#endif
#ifdef TE_MX_HAVE_AVX512_BF16
    case Isa::avx512_bf16:
      return peak_avx512_bf16;
#endif
#ifdef TE_MX_HAVE_AVX512
    case Isa::avx512:
      return peak_avx512;
#endif
#ifdef TE_MX_HAVE_AVX2
    case Isa::avx2:
      return peak_avx2;
#endif
    default:
      return peak_portable;
  }
}

}  // namespace

double peak_gflops(int threads) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kRounds = 100'000;
  const PeakFn run = peak_for(isa_native());
  const auto began = Clock::now();
  double best = 0;
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::atomic<int64_t> flops{0};
    const auto start = Clock::now();
    parallel_for(threads, threads, [&](int64_t) {
      float sink;
      flops += run(kRounds, &sink) * kRounds;
      [[maybe_unused]] volatile float keep = sink;
    });
    const auto end = Clock::now();
    const double seconds = std::chrono::duration<double>(end - start).count();
    best = std::max(best, static_cast<double>(flops.load()) / seconds / 1e9);
    if (attempt >= 10 && end - began > std::chrono::milliseconds(300)) break;
  }
  return best;
}

}  // namespace te_mx::cpu
