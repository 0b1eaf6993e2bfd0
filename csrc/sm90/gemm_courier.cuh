// The courier: a thread of the producer warpgroup that brings gelu_in to the staging and takes D
// away, so that the math warpgroups of a backward GEMM have the main loop of a plain one.
//
// Staging of a math warpgroup, in turns: the courier asks for gelu_in of a block; `arrived`; the
// math warpgroup multiplies by the derivative and leaves D in its place; `staged`; the courier
// stores D. Only with 16-bit gelu_in and D that the copy engine can carry (Side::gelu_in).
#pragma once

#include "gemm_params.cuh"
#include "gemm_staging.cuh"
#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/tma.cuh"

namespace te_mx::sm90 {

// About what a step of K takes with tiles of class 0. Only the courier's pace depends on it.
inline constexpr int kStepCycles = 900;

__device__ __forceinline__ void sleep_until(uint32_t begin, uint32_t cycles) {
  while (static_cast<uint32_t>(clock()) - begin < cycles) __nanosleep(200);
}

// For one thread, beside the math warpgroups. `rank` is the CTA's place along N in its cluster.
template <class Config, class Schedule, class Smem>
__device__ __forceinline__ void carry(const GemmParams& p, const CUtensorMap& out_map,
                                      const CUtensorMap& side_map, const Smem& smem, int rank) {
  static_assert(!Schedule::kAnnounced && Config::kWaves == 1);
  constexpr int kPanels = 2;  // of 64 columns of 16 bits
  Schedule schedule(p);
  Work work;
  uint32_t phase = 0;
  while (schedule.next(work, smem)) {
    const int n0 = work.n0 + rank * 128;
    // NOTE: when all CTAs ask at the same time, memory keeps the operands of the next steps
    // waiting. So the first warpgroup's turn is somewhere in the first third of the block.
    const uint32_t begin = clock(), third = work.k_steps * static_cast<uint32_t>(kStepCycles) / 3;
    const uint32_t first = (5 * blockIdx.x) % 32 * third / 32;
#pragma unroll 1
    for (int math = 0; math < Config::kMath; ++math) {
      sleep_until(begin, first + math * (third / Config::kMath));
      char* const staging = smem.staging(math);
      tile::mbar_arrive_expect(smem.arrived(math), kPanels * kPanelBytes);
      for (int i = 0; i < kPanels; ++i)
        tile::tma_load(staging + i * kPanelBytes, &side_map, smem.arrived(math), n0 + 64 * i,
                       work.m0 + 64 * math);
    }
#pragma unroll 1
    for (int math = 0; math < Config::kMath; ++math) {
      tile::mbar_wait(smem.staged(math), phase);
      for (int i = 0; i < kPanels; ++i) {
        if (work.m0 + 64 * math < work.m_end && n0 + 64 * i < p.epilogue.n)
          tile::tma_store(&out_map, smem.staging(math) + i * kPanelBytes, n0 + 64 * i,
                          work.m0 + 64 * math);
      }
      tile::tma_store_commit();
    }
    tile::tma_store_wait_read<0>();
    phase ^= 1;
  }
  tile::tma_store_wait_all();
}

}  // namespace te_mx::sm90
