// What there is to do of a routing: the pieces of 8, 16 or 32 positions that hold a row of an
// expert, found by every CTA for itself.
#pragma once

#include <cstdint>

#include "te_mx/moe.h"

namespace te_mx::sm90::moe {

inline constexpr int kColumn = 8;         // positions beside each other in an instruction
inline constexpr int kMostPieces = 2048;  // of a launch, those that hold nothing too

struct Piece {
  int first, expert;  // first position
};

// The pieces of a block; without sorted_token_ids a block is one row.
inline __host__ __device__ int pieces_of_block(const Routing& r, int tokens) {
  return r.sorted_token_ids == nullptr ? 1 : (r.block_m + tokens - 1) / tokens;
}

// kTokens: positions of a piece.
template <int kTokens>
struct PieceList {
  const Routing& r;
  int experts;
  int used, blocks;  // positions and blocks that count

  __device__ __forceinline__ PieceList(const Routing& routing, int64_t experts_)
      : r(routing), experts(static_cast<int>(experts_)) {
    const int64_t given = r.num_tokens_post_padded == nullptr
                              ? r.positions
                              : max(__ldcg(r.num_tokens_post_padded), 0);
    const int64_t counted = (given + r.block_m - 1) / r.block_m;
    blocks = static_cast<int>(min(counted, r.blocks));
    if (r.sorted_token_ids == nullptr) blocks = static_cast<int>(min(int64_t{blocks}, r.routed));
    used = static_cast<int>(min(given, r.positions));
  }

  // The routed row at offset i of a piece, -1 for none.
  __device__ __forceinline__ int row(const Piece& piece, int i) const {
    if (r.sorted_token_ids == nullptr) return i == 0 ? piece.first : -1;
    const int at = piece.first + i, block_end = (piece.first / r.block_m + 1) * r.block_m;
    return at < min(block_end, used) ? known(__ldcg(r.sorted_token_ids + at)) : -1;
  }

  // Writes the pieces to do, of kMostPieces from `begin` on, in order and returns their number, to
  // all threads of the CTA. `counts`: room for a number a warp.
  __device__ __forceinline__ int find(Piece* pieces, int* counts, int begin) const {
    const int per = pieces_of_block(r, kTokens), all = min(blocks * per, begin + kMostPieces);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int found = 0;
    int base = begin;
    // NOTE: the first lists are asked for together with the number of positions that count: what
    // lies past them is there, and not used.
    do {
      const int i = base + threadIdx.x, block = i / per;
      const bool there = block < r.blocks;
      const int64_t end = min((int64_t{block} + 1) * r.block_m, r.positions);
      const int first =
          r.sorted_token_ids == nullptr ? block : block * r.block_m + i % per * kTokens;
      const Piece piece{first, there ? __ldcg(r.expert_ids + block) : -1};
      int ids[kTokens];
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        ids[j] = -1;
        if (r.sorted_token_ids == nullptr) {
          if (j == 0) ids[j] = first;
        } else if (there && first + j < end) {
          ids[j] = __ldcg(r.sorted_token_ids + first + j);
        }
      }
      bool holds = false;
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        const bool counts = r.sorted_token_ids == nullptr || first + j < used;
        holds = holds || (counts && known(ids[j]) >= 0);
      }
      holds = holds && i < all && piece.expert >= 0 && piece.expert < experts;
      const uint32_t vote = __ballot_sync(~0u, holds);
      if (lane == 0) counts[warp] = __popc(vote);
      __syncthreads();
      int at = found;
      for (int w = 0; w < warps; ++w) {
        if (w < warp) at += counts[w];
        found += counts[w];
      }
      if (holds) pieces[at + __popc(vote & ((1u << lane) - 1))] = piece;
      __syncthreads();
      base += static_cast<int>(blockDim.x);
    } while (base < all);
    return found;
  }

 private:
  __device__ __forceinline__ int known(int id) const { return id >= 0 && id < r.routed ? id : -1; }
};

}  // namespace te_mx::sm90::moe
