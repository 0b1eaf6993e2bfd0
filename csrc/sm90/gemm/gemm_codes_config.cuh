// The GEMM that reads codes of 4 bits: its parameters, the order of blocks, its shared memory.
#pragma once

#include "gemm/gemm_cluster.cuh"
#include "gemm/gemm_codes.cuh"
#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {

// rhs has codes of 4 bits, lhs is tiles of kLhs.
template <tile::Fp8 kLhs_>
struct CodesOperands {
  static constexpr tile::Fp8 kLhs = kLhs_, kRhs = tile::Fp8::e4m3;
};

struct CodesParams : GemmParams {
  static constexpr ScheduleKind kSchedule = ScheduleKind::cluster;
  PartsOfK k;
  PlainScales rhs;
  FinishParams finish;  // of EpilogueKind::sums
  // The kernel before this one makes the tiles of lhs, and has waited for those before it: codes of
  // rhs are there.
  bool lhs_comes;
};

using CodesScheduler = Scheduler<CodesParams>;

// As GemmConfig. Codes of 4 bits come to stages of their own, `raw`. Where the sums stay in shared
// memory there is no staging, and room for one more stage.
template <class Operands_, EpilogueKind kEpilogue_>
struct CodesConfig {
  using Operands = Operands_;
  using Promotion = PowerOfTwoScales;
  static constexpr EpilogueKind kEpilogue = kEpilogue_;
  static constexpr bool kByWarps = false;
  static constexpr bool kKeepsSums = kEpilogue == EpilogueKind::sums;
  static constexpr int kM = 128, kN = 128, kStages = kKeepsSums ? 5 : 4, kCluster = 1, kSlots = 1;
  static constexpr int kMath = 2, kWaves = 1, kLhsTiles = 1;
  static constexpr int kTurns = 2;  // warpgroups that unpack, and take turns at the steps
  static constexpr int kThreads = 128 * (1 + kMath + kTurns);
  static constexpr int kRaw = kKeepsSums ? 4 : 6;
  // Who waits for a stage of codes has read those that were there before.
  static_assert(kRaw % kTurns == 0);
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
  static constexpr int kStaging = kRaw + Config::kRaw * kRawTileBytes;
  static constexpr int kScales = kStaging + Config::kMath * Config::kStaging;
  static constexpr int kColumns = kScales + Config::kStages * Config::kScaleBytes;
  static constexpr int kStreams = kColumns + Config::kStages * Config::kColumnBytes;
  static constexpr int kSaid = kStreams + kScaleStreamBytes;
  static constexpr int kSeen = kSaid + (Config::kRaw + 3) / 4 * 16;
  static constexpr int kTables = kSeen + Config::kTurns * kSeenBytes;
  static constexpr int kBias = kTables + kFp4Tables * 8;
  static constexpr int kBarriers = kBias + Config::kBiasesBytes;
  static constexpr int kExchange =
      (kBarriers + 8 * (3 * Config::kStages + 2 * Config::kRaw) + 15) / 16 * 16;
  static constexpr int kBytes = kExchange + (Config::kKeepsSums ? sizeof(ExchangeRoom) : 0);
  static_assert(kBytes <= 232448, "a block has 227 KiB of shared memory");
  char* base;
  __device__ __forceinline__ explicit Smem(char* start) : base(start) {}
  __device__ __forceinline__ char* lhs(int s) const { return base + s * Config::kLhsBytes; }
  __device__ __forceinline__ char* rhs(int s) const { return base + kRhs + s * Config::kRhsBytes; }
  __device__ __forceinline__ char* raw(int i) const { return base + kRaw + i * kRawTileBytes; }
  __device__ __forceinline__ char* scales(int s) const {
    return base + kScales + s * Config::kScaleBytes;
  }
  __device__ __forceinline__ char* scales(Role side, int s) const {
    return scales(s) + (side == Role::lhs ? 0 : Config::kLhsScaleBytes);
  }
  __device__ __forceinline__ char* columns(int s) const {
    return base + kColumns + s * Config::kColumnBytes;
  }
  // What is said of the rows of raw(i).
  __device__ __forceinline__ char* said(int i) const { return base + kSaid + 4 * i; }
  __device__ __forceinline__ char* stream() const { return base + kStreams; }
  // Of a warpgroup that unpacks.
  __device__ __forceinline__ char* seen(int unpacks) const {
    return base + kSeen + unpacks * kSeenBytes;
  }
  __device__ __forceinline__ uint2* tables() const {
    return reinterpret_cast<uint2*>(base + kTables);
  }
  __device__ __forceinline__ char* staging(int math) const {
    return base + kStaging + math * Config::kStaging;
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
  __device__ __forceinline__ ExchangeRoom& exchange() const {
    return *reinterpret_cast<ExchangeRoom*>(base + kExchange);
  }
  __device__ __forceinline__ uint64_t* arrived(int) const { return nullptr; }
  __device__ __forceinline__ uint64_t* staged(int) const { return nullptr; }
};

}  // namespace te_mx::sm90
