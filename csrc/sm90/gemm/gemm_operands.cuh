// How the codes of a step come from memory to the tensor cores: a policy of the main loop.
//
// A policy says
//   kLhs, kRhs          what the tensor cores multiply
//   kLhsBytes<kRows>    shared memory of a stage's codes of so many rows, 128 of K; kRhsBytes alike
//   kArrive<..>         bytes of them that the copy engine brings
//   load_lhs<Config>(...), load_rhs(...)
//                       start the copies of a stage; one thread calls them
//
// rhs is E4M3: E5M2, of more range and fewer bits, is for gradients, which are lhs. Codes of 4 bits
// have a kernel of their own (gemm_codes_kernel.cuh).
#pragma once

#include <cstdint>

#include "gemm/gemm_params.cuh"
#include "mxtile/sm90/tma.cuh"
#include "mxtile/sm90/wgmma.cuh"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

// Codes of 8 bits, which lie in memory as the tensor cores read them: they arrive in the stage.
template <tile::Fp8 kLhs_>
struct ByteOperands {
  static constexpr tile::Fp8 kLhs = kLhs_, kRhs = tile::Fp8::e4m3;
  template <int kRows>
  static constexpr int kLhsBytes = kRows * 128;
  template <int kRows>
  static constexpr int kRhsBytes = kRows * 128;
  template <int kLhsRows, int kRhsRows>
  static constexpr int kArrive = kLhsBytes<kLhsRows> + kRhsBytes<kRhsRows>;

  // To shared addresses; neighbours in a cluster send each other halves of lhs.
  template <class Config>
  static __device__ __forceinline__ void load_lhs(uint32_t lhs, const CUtensorMap& lhs_map,
                                                  uint32_t ready, const TileSources& from,
                                                  int rank) {
    if constexpr (Config::kCluster == 1) {
      tile::tma_load(lhs, &lhs_map, ready, from.k0, from.m_row);
    } else {
      constexpr int kHalf = Config::kM / Config::kCluster;
      tile::tma_load_multicast(lhs, &lhs_map, ready, from.k0, from.m_row + rank * kHalf, 3);
    }
  }
  static __device__ __forceinline__ void load_rhs(uint32_t rhs, const CUtensorMap& rhs_map,
                                                  uint32_t ready, const TileSources& from) {
    tile::tma_load(rhs, &rhs_map, ready, from.k0, from.n_row);
  }
};

}  // namespace te_mx::sm90
