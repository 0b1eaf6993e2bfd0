// How the codes of a step come from memory to the tensor cores: a policy of the main loop.
//
// A policy says
//   kLhs, kRhs          what the tensor cores multiply
//   kLhsBytes<kRows>    shared memory of a stage's codes of so many rows, 128 of K; kRhsBytes alike
//   Copies<Config>      which copies bring a block's codes, and how many bytes come; one thread
//                       calls load_lhs(..) and load_rhs(..), which start those of a stage
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

// Boxes of codes, and of the last rows that do not fill one.
struct CodeMaps {
  const CUtensorMap &lhs, &lhs_end, &rhs, &rhs_end;
};

// Codes of 8 bits, which lie in memory as the tensor cores read them: they arrive in the stage.
template <tile::Fp8 kLhs_>
struct ByteOperands {
  static constexpr tile::Fp8 kLhs = kLhs_, kRhs = tile::Fp8::e4m3;
  template <int kRows>
  static constexpr int kLhsBytes = kRows * 128;
  template <int kRows>
  static constexpr int kRhsBytes = kRows * 128;

  // NOTE: rows that are not there are not asked for (TensorMaps), and what lies in their place in a
  // stage is left as it is: nobody stores what comes of it. Neighbours in a cluster send each other
  // halves of lhs.
  template <class Config>
  struct Copies {
    static constexpr int kBox = Config::kM / Config::kCluster;
    const CUtensorMap *lhs, *rhs;
    int row, lhs_rows, rhs_rows, bytes;  // `bytes` of a stage, with those that a neighbour sends

    __device__ __forceinline__ Copies(const GemmParams& p, const CodeMaps& maps,
                                      const TileSources& from, int rank)
        : row(from.m_row + rank * kBox),
          lhs_rows(min(kBox, p.lhs_rows - row)),
          rhs_rows(min(Config::kN, p.rhs_rows - from.n_row)) {
      lhs = lhs_rows == kBox ? &maps.lhs : &maps.lhs_end;
      rhs = rhs_rows == Config::kN ? &maps.rhs : &maps.rhs_end;
      bytes = 128 * (min(Config::kM, p.lhs_rows - from.m_row) + max(rhs_rows, 0));
    }
    // To shared addresses.
    __device__ __forceinline__ void load_lhs(uint32_t to, uint32_t ready, int k0) const {
      if constexpr (Config::kCluster == 1) {
        tile::tma_load(to, lhs, ready, k0, row);
      } else {
        if (lhs_rows > 0) tile::tma_load_multicast(to, lhs, ready, k0, row, 3);
      }
    }
    __device__ __forceinline__ void load_rhs(uint32_t to, uint32_t ready, int k0, int n_row) const {
      if (rhs_rows > 0) tile::tma_load(to, rhs, ready, k0, n_row);
    }
  };
};

}  // namespace te_mx::sm90
