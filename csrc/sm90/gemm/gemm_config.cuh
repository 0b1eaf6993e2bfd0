// A configuration of the GEMM: the shape of a block, how its operands arrive, how products are
// promoted, and the shared memory that follows.
#pragma once

#include <algorithm>

#include "gemm/gemm_epilogue.cuh"
#include "gemm/gemm_epilogue_warp.cuh"
#include "gemm/gemm_params.cuh"

namespace te_mx::sm90 {

struct ExchangeRoom;  // gemm_exchange.cuh

template <int kM_, int kStages_, int kCluster_, int kSlots_>
struct BlockShape {
  static constexpr int kM = kM_, kN = 128, kStages = kStages_, kCluster = kCluster_,
                       kSlots = kSlots_;
  static constexpr int kMath = kM == 192 ? 3 : kM == 64 ? 1 : 2;
  static constexpr int kWaves = kM / 64 / kMath;
  static constexpr int kLhsTiles = (kM + 127) / 128;
  // With GELU, aux and the bias gradient. Registers do not suffice for them beside 256 rows, and
  // 128 rows without take half as long to compile.
  static constexpr bool kFull = kM == 64 || kM == 192;
  static constexpr int kThreads = 128 + 128 * kMath;
  // Registers of a thread as a kernel starts, and of math warpgroups then. NOTE: of 128 rows no
  // more than they need, so that the kernel which makes lhs of a next product starts beside this
  // one.
  static constexpr bool kSmall = kMath == 2 && kWaves == 1;
  static constexpr int kStartThreads = kSmall ? 512 : kThreads;  // that would have so many
  static constexpr int kMathRegisters = kMath == 3 ? 160 : kSmall ? 168 : 232;
  static_assert(!kFull || (kWaves == 1 && kSlots == 2),
                "a wave of 16-bit numbers fits the staging");
};

// Operands: gemm_operands.cuh. Promotion: gemm_step.cuh.
template <class Shape, class Operands_, class Promotion_>
struct GemmConfig : Shape {
  using Operands = Operands_;
  using Promotion = Promotion_;
  using Shape::kFull, Shape::kLhsTiles, Shape::kM, Shape::kMath, Shape::kN, Shape::kSlots,
      Shape::kStages;
  static constexpr int kLhsBytes = Operands::template kLhsBytes<kM>;
  static constexpr int kRhsBytes = Operands::template kRhsBytes<kN>;
  static constexpr int kLhsScaleBytes = kLhsTiles * Promotion::kLhsTileBytes;
  static constexpr int kScaleBytes = kLhsScaleBytes + Promotion::kRhsTileBytes;
  static constexpr int kStageBytes = kLhsBytes + kRhsBytes + kScaleBytes;
  // Of a stage: what the promotion prepares against each lhs tile, and the modes.
  static constexpr int kColumnBytes =
      Promotion::kPrepares ? kLhsTiles * Promotion::kPreparedBytes + 16 : 0;
  // Of a stage that is ready: by those who prepare it, and by the producer for the codes.
  static constexpr int kReady = (Promotion::kPrepares ? kPrepared * kLhsTiles : 0) + 1;
  static constexpr int kStaging = kSlots * kPanelBytes;  // per math warpgroup
  // Whether its warps store D themselves: where there is one slot, in which the copy engine
  // reads while everybody waits, and of two where the promotion says so.
  static constexpr bool kByWarps = kSlots == 1 || (kSlots == 2 && Promotion::kWarpsStore);
  // Blocks of which the producer says where they lie: it is never further ahead (gemm_grouped.cuh).
  static constexpr int kWorkTiles = 8;
  static constexpr int kWorkTileBytes = kWorkTiles * sizeof(WorkTile);
  // One place for what no kernel needs together: bias and works, or constants.
  static constexpr int kBiasesBytes = kMath * kBiasBytes;
  static constexpr int kSharedBytes =
      (std::max(kBiasesBytes + kWorkTileBytes, kFull ? kConstantBytes : 0) + 15) / 16 * 16;
  static constexpr int kSmem = kStages * (kStageBytes + kColumnBytes) + kMath * (kStaging + 16) +
                               kSharedBytes + 3 * kStages * 8;
  static_assert(kStages < kWorkTiles);
  static_assert(kSmem <= 232448, "a block has 227 KiB of shared memory");
};

// Shared memory as offsets from its start, a 1024-byte boundary.
template <class Config>
struct Smem {
  static constexpr int kRhs = Config::kStages * Config::kLhsBytes;
  static constexpr int kStaging = kRhs + Config::kStages * Config::kRhsBytes;
  static constexpr int kScales = kStaging + Config::kMath * Config::kStaging;
  static constexpr int kBias = kScales + Config::kStages * Config::kScaleBytes;
  static constexpr int kConstants = kBias, kWork = kBias + Config::kBiasesBytes;
  static constexpr int kColumns = kBias + Config::kSharedBytes;
  static constexpr int kBarriers = kColumns + Config::kStages * Config::kColumnBytes;
  // From `full` of a stage to its other barriers.
  static constexpr int kToEmpty = 8 * Config::kStages, kToReady = 2 * kToEmpty;
  char* base;
  __device__ __forceinline__ explicit Smem(char* start) : base(start) {}
  __device__ __forceinline__ char* lhs(int s) const { return base + s * Config::kLhsBytes; }
  __device__ __forceinline__ char* rhs(int s) const { return base + kRhs + s * Config::kRhsBytes; }
  __device__ __forceinline__ char* staging(int math) const {
    return base + kStaging + math * Config::kStaging;
  }
  __device__ __forceinline__ char* scales(int s) const {
    return base + kScales + s * Config::kScaleBytes;
  }
  __device__ __forceinline__ char* bias(int math) const { return base + kBias + math * kBiasBytes; }
  // In place of the bias.
  __device__ __forceinline__ ExchangeRoom& exchange() const {
    static_assert(kBias % 16 == 0 && Config::kMath * kBiasBytes >= 1024);
    return *reinterpret_cast<ExchangeRoom*>(base + kBias);
  }
  __device__ __forceinline__ char* columns(int s) const {
    return base + kColumns + s * Config::kColumnBytes;
  }
  __device__ __forceinline__ char* constants() const { return base + kConstants; }
  __device__ __forceinline__ WorkTile* work(int i) const {
    return reinterpret_cast<WorkTile*>(base + kWork) + i % Config::kWorkTiles;
  }
  __device__ __forceinline__ uint64_t* full(int s) const {
    return reinterpret_cast<uint64_t*>(base + kBarriers) + s;
  }
  __device__ __forceinline__ uint64_t* empty(int s) const { return full(s) + kToEmpty / 8; }
  __device__ __forceinline__ uint64_t* ready(int s) const { return full(s) + kToReady / 8; }
  __device__ __forceinline__ uint64_t* arrived(int math) const {
    return full(3 * Config::kStages + math);
  }
  __device__ __forceinline__ uint64_t* staged(int math) const {
    return arrived(Config::kMath + math);
  }
};

// A position in the ring of stages.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

}  // namespace te_mx::sm90
