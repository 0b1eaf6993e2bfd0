// The epilogue warp: a thread of the producer warpgroup that moves what passes through the staging
// of the math warpgroups, so that a GELU GEMM has the main loop of a plain one and few barriers
// behind it.
//
// The staging of a math warpgroup has one owner at a time. `staged` gives it to the epilogue warp,
// and `arrived` gives it back:
//   backward  it loads gelu_in of a block; the math warpgroup multiplies by the derivative and
//   leaves
//             D in its place; it stores D
//   forward   the math warpgroup leaves aux, which it stores, then D
// Only with an aux or gelu_in and a D of the same 16-bit dtype that the copy engine can carry
// (SideTensor).
#pragma once

#include "gemm/gemm_params.cuh"
#include "gemm/gemm_staging.cuh"
#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/tma.cuh"

namespace te_mx::sm90 {

inline constexpr int kWavePanels = 2;  // of 64 columns of 16 bits, in a wave

// About what a step of K takes with tiles of class 0, for each math warpgroup. Only the epilogue
// warp's pace depends on it.
inline constexpr int kStepCycles = 280;

__device__ __forceinline__ void sleep_until(uint32_t begin, uint32_t cycles) {
  while (static_cast<uint32_t>(clock()) - begin < cycles) __nanosleep(200);
}

// Asks for gelu_in of a block, its left columns at n0. NOTE: when all CTAs ask at the same time,
// memory keeps the operands of the next steps waiting. So the first warpgroup's turn is somewhere
// in the first third of the block.
template <class Config, class Smem>
__device__ __forceinline__ void load_side_tensor(const CUtensorMap& map, const Smem& smem,
                                                 const WorkTile& work, int n0) {
  const uint32_t begin = clock(),
                 third = work.k_steps * static_cast<uint32_t>(kStepCycles * Config::kMath) / 3;
  const uint32_t first = (5 * blockIdx.x) % 32 * third / 32;
#pragma unroll 1
  for (int math = 0; math < Config::kMath; ++math) {
    sleep_until(begin, first + math * (third / Config::kMath));
    tile::mbar_arrive_expect(smem.arrived(math), kWavePanels * kPanelBytes);
    for (int i = 0; i < kWavePanels; ++i)
      tile::tma_load(smem.staging(math) + i * kPanelBytes, &map, smem.arrived(math), n0 + 64 * i,
                     work.m0 + 64 * math);
  }
}

// Stores what every math warpgroup leaves in the phase of this parity.
template <class Config, class Smem>
__device__ __forceinline__ void store_staged(const CUtensorMap& map, const Smem& smem,
                                             const WorkTile& work, int n0, int n, uint32_t parity) {
#pragma unroll 1
  for (int math = 0; math < Config::kMath; ++math) {
    tile::mbar_wait_asleep(smem.staged(math), parity);
    for (int i = 0; i < kWavePanels; ++i) {
      if (work.m0 + 64 * math < work.m_end && n0 + 64 * i < n)
        tile::tma_store(&map, smem.staging(math) + i * kPanelBytes, n0 + 64 * i,
                        work.m0 + 64 * math);
    }
    tile::tma_store_commit();
  }
}

// For one thread, beside the math warpgroups. `rank` is the CTA's place along N in its cluster.
template <class Config, class Schedule, bool kBackward, class Smem>
__device__ __forceinline__ void run_epilogue_warp(const GemmParams& p, const CUtensorMap& out_map,
                                                  const CUtensorMap& side_map, const Smem& smem,
                                                  int rank) {
  static_assert(!Schedule::kDynamic && Config::kWaves == 1);
  Schedule schedule(p);
  WorkTile work;
  uint32_t parity = 0;
  while (schedule.next(work, smem)) {
    const int n0 = work.n0 + rank * 128, n = p.epilogue.n;
    if constexpr (kBackward) {
      load_side_tensor<Config>(side_map, smem, work, n0);
      store_staged<Config>(out_map, smem, work, n0, n, parity);
      tile::tma_store_wait_read<0>();
      parity ^= 1;
    } else {
#pragma unroll 1
      for (uint32_t turn = 0; turn < 2; ++turn) {
        store_staged<Config>(turn == 0 ? side_map : out_map, smem, work, n0, n, turn);
        if constexpr (Config::kMath == 3) {
          tile::tma_store_wait_read<2>();
          tile::mbar_arrive(smem.arrived(0));
          tile::tma_store_wait_read<1>();
          tile::mbar_arrive(smem.arrived(1));
        }
        tile::tma_store_wait_read<0>();
        tile::mbar_arrive(smem.arrived(Config::kMath - 1));
      }
    }
  }
  tile::tma_store_wait_all();
}

}  // namespace te_mx::sm90
