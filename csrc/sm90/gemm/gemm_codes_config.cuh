// The GEMM that reads codes of 4 bits: its parameters, the order of blocks, its shared memory.
#pragma once

#include "gemm/gemm_codes.cuh"
#include "gemm/gemm_finish.cuh"
#include "gemm/gemm_kernel.cuh"
#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {

// rhs has codes of 4 bits. lhs has them too, or is tiles of bytes of kLhs.
template <tile::Fp8 kLhs_, bool kLhsNibbles_>
struct CodesOperands {
  static constexpr tile::Fp8 kLhs = kLhs_, kRhs = tile::Fp8::e4m3;
  static constexpr bool kLhsNibbles = kLhsNibbles_;
  static constexpr int kNibbleSides = kLhsNibbles ? 2 : 1;
  static_assert(!kLhsNibbles || kLhs == tile::Fp8::e4m3);
};

struct CodesParams : GemmParams {
  int parts;             // of K, one a CTA of a cluster
  PlainScales lhs, rhs;  // of those that are not tiles
  FinishParams finish;   // of EpilogueKind::sums
};

// Blocks of 128 x 128, of which a cluster computes one at a time; its CTAs share out K.
class CodesScheduler {
 public:
  static constexpr bool kDynamic = false;
  struct Place {
    int m0, n0, first, end;  // steps of K
  };
  __device__ __forceinline__ explicit CodesScheduler(const CodesParams& p)
      : p_(p), index_(static_cast<int>(blockIdx.x) / p.parts) {}

  __device__ __forceinline__ bool take(Place& at) {
    if (index_ >= p_.m_blocks * p_.n_blocks) return false;
    const Block block = block_at(p_, p_.m_blocks, index_);
    const int part = static_cast<int>(blockIdx.x) % p_.parts;
    at.m0 = block.m * 128, at.n0 = block.n * 128;
    at.first = boundary(part), at.end = boundary(part + 1);
    index_ += static_cast<int>(gridDim.x) / p_.parts;
    return true;
  }

  // For those who multiply (gemm_kernel.cuh).
  __device__ __forceinline__ void await(uint64_t*, uint32_t) {}
  template <class Smem>
  __device__ __forceinline__ bool next(WorkTile& work, const Smem&) {
    Place at;
    if (!take(at)) return false;
    work.m0 = at.m0, work.m_end = p_.epilogue.m, work.n0 = at.n0;
    work.k_steps = at.end - at.first;
    work.inside = 0, work.group = 0;
    return true;
  }

 private:
  // As those of gemm_split.cuh, so that sums have the same bits.
  __device__ __forceinline__ int boundary(int part) const {
    return static_cast<int>(static_cast<int64_t>(part) * p_.k_steps / p_.parts);
  }

  const CodesParams& p_;
  int index_;
};

template <>
struct Schedulers<CodesParams> {
  template <class Config>
  using Follower = CodesScheduler;
};

// As GemmConfig. Codes of 4 bits come to stages of their own, `raw`, more of them where the sums
// stay in shared memory, which then needs no staging.
template <class Operands_, EpilogueKind kEpilogue_>
struct CodesConfig {
  using Operands = Operands_;
  using Promotion = PowerOfTwoScales;
  static constexpr EpilogueKind kEpilogue = kEpilogue_;
  static constexpr bool kKeepsSums = kEpilogue == EpilogueKind::sums;
  static constexpr int kM = 128, kN = 128, kStages = 4, kCluster = 1, kSlots = 1;
  static constexpr int kMath = 2, kWaves = 1, kLhsTiles = 1;
  static constexpr int kSides = Operands::kNibbleSides;
  // Warpgroups that unpack: one for each side, or two that take turns at the steps of rhs.
  static constexpr int kUnpackGroups = 2, kTurns = kUnpackGroups / kSides;
  static constexpr int kThreads = 128 * (1 + kMath + kUnpackGroups);
  static constexpr int kRaw = kSides == 1 ? 6 : kKeepsSums ? 4 : 3;
  static constexpr int kRawBytes = kSides * kRawTileBytes;
  static constexpr int kLhsBytes = 128 * 128, kRhsBytes = 128 * 128;
  static constexpr int kLhsScaleBytes = Promotion::kLhsTileBytes;
  static constexpr int kScaleBytes = kLhsScaleBytes + Promotion::kRhsTileBytes;
  static constexpr int kColumnBytes = Promotion::kPreparedBytes + 16;
  static constexpr int kStaging = kKeepsSums ? 0 : kSlots * kPanelBytes;
  static constexpr int kBiasesBytes = kKeepsSums ? 0 : kMath * kBiasBytes;
  // Registers of a thread of each kind of warpgroup.
  static constexpr int kProducerRegs = 32, kMathRegs = 160, kUnpackRegs = 64;
};

template <class Operands, EpilogueKind kEpilogue>
struct Smem<CodesConfig<Operands, kEpilogue>> {
  using Config = CodesConfig<Operands, kEpilogue>;
  static constexpr int kRhs = Config::kStages * Config::kLhsBytes;
  static constexpr int kRaw = kRhs + Config::kStages * Config::kRhsBytes;
  static constexpr int kStaging = kRaw + Config::kRaw * Config::kRawBytes;
  static constexpr int kScales = kStaging + Config::kMath * Config::kStaging;
  static constexpr int kColumns = kScales + Config::kStages * Config::kScaleBytes;
  static constexpr int kStreams = kColumns + Config::kStages * Config::kColumnBytes;
  static constexpr int kSaid = kStreams + Config::kSides * kScaleStreamBytes;
  static constexpr int kSeen = kSaid + (Config::kRaw * Config::kSides + 3) / 4 * 16;
  static constexpr int kTables = kSeen + Config::kUnpackGroups * kSeenBytes;
  static constexpr int kBias = kTables + kFp4Tables * 8;
  static constexpr int kBarriers = kBias + Config::kBiasesBytes;
  static constexpr int kBytes = kBarriers + 8 * (3 * Config::kStages + 2 * Config::kRaw);
  static constexpr int kSums = 64 * 128 * 4;  // of a math warpgroup
  static_assert(kBytes <= 232448, "a block has 227 KiB of shared memory");
  static_assert(Config::kMath * kSums <= kRaw);
  char* base;
  __device__ __forceinline__ explicit Smem(char* start) : base(start) {}
  __device__ __forceinline__ char* lhs(int s) const { return base + s * Config::kLhsBytes; }
  __device__ __forceinline__ char* rhs(int s) const { return base + kRhs + s * Config::kRhsBytes; }
  __device__ __forceinline__ char* stage(Role side, int s) const {
    return side == Role::lhs ? lhs(s) : rhs(s);
  }
  // That of rhs first: lhs may have none.
  __device__ __forceinline__ char* raw(Role side, int i) const {
    return base + kRaw + i * Config::kRawBytes + (side == Role::lhs ? kRawTileBytes : 0);
  }
  __device__ __forceinline__ char* scales(int s) const {
    return base + kScales + s * Config::kScaleBytes;
  }
  __device__ __forceinline__ char* scales(Role side, int s) const {
    return scales(s) + (side == Role::lhs ? 0 : Config::kLhsScaleBytes);
  }
  __device__ __forceinline__ char* columns(int s) const {
    return base + kColumns + s * Config::kColumnBytes;
  }
  // What is said of the rows of raw(side, i).
  __device__ __forceinline__ char* said(Role side, int i) const {
    return base + kSaid + (i * Config::kSides + (side == Role::lhs ? 1 : 0)) * 4;
  }
  __device__ __forceinline__ char* stream(Role side) const {
    return base + kStreams + (side == Role::lhs ? kScaleStreamBytes : 0);
  }
  // Of a warpgroup that unpacks.
  __device__ __forceinline__ char* seen(int unpacks) const {
    return base + kSeen + unpacks * kSeenBytes;
  }
  __device__ __forceinline__ uint2* tables() const {
    return reinterpret_cast<uint2*>(base + kTables);
  }
  // Sums stay where the stages of lhs were.
  __device__ __forceinline__ char* staging(int math) const {
    return base + (Config::kKeepsSums ? math * kSums : kStaging + math * Config::kStaging);
  }
  __device__ __forceinline__ char* bias(int math) const { return base + kBias + math * kBiasBytes; }
  __device__ __forceinline__ char* constants() const { return nullptr; }
  __device__ __forceinline__ uint64_t* barrier(int i) const {
    return reinterpret_cast<uint64_t*>(base + kBarriers) + i;
  }
  __device__ __forceinline__ uint64_t* full(int s) const { return barrier(s); }  // scale words
  __device__ __forceinline__ uint64_t* empty(int s) const { return barrier(Config::kStages + s); }
  __device__ __forceinline__ uint64_t* ready(int s) const {
    return barrier(2 * Config::kStages + s);
  }
  __device__ __forceinline__ uint64_t* raw_full(int i) const {
    return barrier(3 * Config::kStages + i);
  }
  __device__ __forceinline__ uint64_t* raw_empty(int i) const { return raw_full(Config::kRaw + i); }
  __device__ __forceinline__ uint64_t* arrived(int) const { return nullptr; }
  __device__ __forceinline__ uint64_t* staged(int) const { return nullptr; }
};

}  // namespace te_mx::sm90
