// The adaptive MXFP8 GEMM: D[M, N] = lhs[M, K] @ rhs[N, K]^T on packed operands (te_mx/sm90.h).
//
// A persistent CTA has a producer warpgroup, one thread of which feeds a ring of stages through the
// copy engine, and two or three math warpgroups. A stage is 128 of K: codes of lhs [kM, 128] and
// rhs [128, 128], and their scale tiles. Each math warpgroup has its own rows, in waves of 64:
//
//   kM       0..63      64..127   128..191  192..255
//   128      math 0     math 1
//   192      math 0     math 1    math 2
//   256      math 0: waves 0, 1   math 1: waves 0, 1
//
// While one math warpgroup promotes its accumulators on the CUDA cores, the others keep the tensor
// cores busy. In a cluster of two, neighbours along N share the lhs tile: each loads one half and
// sends it to both.
#pragma once

#include "gemm_epilogue.cuh"
#include "gemm_params.cuh"
#include "gemm_promote.cuh"
#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/tma.cuh"
#include "mxtile/sm90/wgmma.cuh"

namespace te_mx::sm90 {

template <int kM_, int kStages_, int kCluster_, int kSlots_>
struct GemmConfig {
  static constexpr int kM = kM_, kN = 128, kStages = kStages_, kCluster = kCluster_,
                       kSlots = kSlots_;
  static constexpr int kMath = kM == 192 ? 3 : 2;
  static constexpr int kWaves = kM / 64 / kMath;
  static constexpr int kLhsTiles = (kM + 127) / 128;
  static constexpr int kTileBytes = static_cast<int>(kScaleWords * 4);
  static constexpr int kLhsBytes = kM * 128, kRhsBytes = kN * 128;
  static constexpr int kScaleBytes = (kLhsTiles + 1) * kTileBytes;
  static constexpr int kStageBytes = kLhsBytes + kRhsBytes + kScaleBytes;
  static constexpr int kStaging = kSlots * kPanelBytes;  // per math warpgroup
  static constexpr int kThreads = 128 + 128 * kMath;
  static constexpr int kSmem =
      1024 + kStages * kStageBytes + kMath * (kStaging + 512 + 2048) + 2 * kStages * 8;
  // Slots are taken in turn, and a block of 16-bit output starts at slot 0 again.
  static_assert(2 * kWaves % kSlots == 0, "a block fills every slot equally often");
  static_assert(kSmem <= 232448, "a block has 227 KiB of shared memory");
};

// Shared memory as offsets from one 1024-byte boundary.
template <class Config>
struct Smem {
  static constexpr int kRhs = Config::kStages * Config::kLhsBytes;
  static constexpr int kStaging = kRhs + Config::kStages * Config::kRhsBytes;
  static constexpr int kScales = kStaging + Config::kMath * Config::kStaging;
  static constexpr int kBias = kScales + Config::kStages * Config::kScaleBytes;
  static constexpr int kScratch = kBias + Config::kMath * 512;
  static constexpr int kBarriers = kScratch + Config::kMath * 2048;
  char* base;
  __device__ __forceinline__ explicit Smem(char* raw) {
    base = raw + (1024 - (tile::smem_addr(raw) & 1023)) % 1024;
  }
  __device__ __forceinline__ char* lhs(int s) const { return base + s * Config::kLhsBytes; }
  __device__ __forceinline__ char* rhs(int s) const { return base + kRhs + s * Config::kRhsBytes; }
  __device__ __forceinline__ char* staging(int math) const {
    return base + kStaging + math * Config::kStaging;
  }
  __device__ __forceinline__ char* scales(int s) const {
    return base + kScales + s * Config::kScaleBytes;
  }
  __device__ __forceinline__ float* bias(int math) const {
    return reinterpret_cast<float*>(base + kBias) + math * 128;
  }
  __device__ __forceinline__ char* scratch(int math) const { return base + kScratch + math * 2048; }
  __device__ __forceinline__ uint64_t* full(int s) const {
    return reinterpret_cast<uint64_t*>(base + kBarriers) + s;
  }
  __device__ __forceinline__ uint64_t* empty(int s) const { return full(Config::kStages + s); }
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

template <class Config>
__device__ __forceinline__ void produce(const GemmParams& p, const CUtensorMap& lhs_map,
                                        const CUtensorMap& rhs_map, const Smem<Config>& smem,
                                        int rank) {
  constexpr int kHalf = Config::kM / Config::kCluster;
  Ring<Config::kStages> ring;
  for (int index = blockIdx.x / Config::kCluster; index < p.m_blocks * p.n_blocks;
       index += gridDim.x / Config::kCluster) {
    const Block block = block_at(p, index);
    const int m0 = block.m * Config::kM, n_tile = block.n * Config::kCluster + rank;
    const int lhs_tile = m0 / 128;
    const uint32_t* lhs_scales = p.lhs_scales + static_cast<int64_t>(lhs_tile) * kScaleWords;
    // NOTE: 192 rows may end in a tile that does not exist; nothing of it is stored.
    const int64_t second = lhs_tile + 1 < p.lhs_tiles ? kScaleWords : 0;
    // NOTE: the last block of an odd number of tiles has no tile for rank 1; the packing pads to an
    // even number.
    const uint32_t* rhs_scales = p.rhs_scales + static_cast<int64_t>(n_tile) * kScaleWords;
#pragma unroll 1
    for (int k = 0; k < p.k_steps; ++k, ring.next()) {
      const int s = ring.stage;
      tile::mbar_wait(smem.empty(s), ring.phase ^ 1);
      uint64_t* const full = smem.full(s);
      tile::mbar_arrive_expect(full, Config::kStageBytes);
      char* const lhs = smem.lhs(s);
      if constexpr (Config::kCluster == 1) {
        tile::tma_load(lhs, &lhs_map, full, k * 128, m0);
      } else {
        tile::tma_load_multicast(lhs + rank * kHalf * 128, &lhs_map, full, k * 128,
                                 m0 + rank * kHalf, 3);
      }
      tile::tma_load(smem.rhs(s), &rhs_map, full, k * 128, n_tile * 128);
      char* const scales = smem.scales(s);
      if constexpr (Config::kM == 192) {
        tile::bulk_load(scales, lhs_scales, Config::kTileBytes, full);
        tile::bulk_load(scales + Config::kTileBytes, lhs_scales + second, Config::kTileBytes, full);
      } else {
        tile::bulk_load(scales, lhs_scales, Config::kLhsTiles * Config::kTileBytes, full);
      }
      tile::bulk_load(scales + Config::kLhsTiles * Config::kTileBytes, rhs_scales,
                      Config::kTileBytes, full);
      lhs_scales += static_cast<int64_t>(p.lhs_tiles) * kScaleWords;
      rhs_scales += static_cast<int64_t>(p.rhs_tiles) * kScaleWords;
    }
  }
}

// kCount K = 32 products of one wave as a chain. The first one overwrites the accumulators.
template <tile::Fp8 kLhs, tile::Fp8 kRhs, int kCount>
__device__ __forceinline__ void multiply(float (&acc)[64], uint32_t lhs, uint32_t rhs) {
  tile::wgmma_pin(acc);
  tile::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kCount; ++kk)
    tile::wgmma_64x128x32<kLhs, kRhs>(acc, lhs + 2 * kk, rhs + 2 * kk, kk != 0);
  tile::wgmma_commit();
  tile::wgmma_wait<0>();
  tile::wgmma_pin(acc);
}

// Writes the fp32 scales of the step's four blocks for every column to this warpgroup's scratch:
// [4][128].
__device__ __forceinline__ void expand_columns(uint32_t words, uint32_t scratch, uint32_t rhs_class,
                                               int thread, int barrier) {
  const uint32_t word = tile::ld_shared_u32(words + 4 * thread);
  tile::named_barrier(barrier, 128);  // the last step's readers are done
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    tile::st_shared_f32(scratch + 512 * kk + 4 * thread, WordReader(rhs_class, kk).scale(word));
  }
  tile::named_barrier(barrier, 128);
}

template <class Config>
__device__ __forceinline__ void release(uint64_t* empty, int lane) {
  __syncwarp();
  if constexpr (Config::kCluster == 1) {
    if (lane == 0) tile::mbar_arrive(empty);
  } else {
    if (lane < Config::kCluster) tile::mbar_arrive_at(empty, lane);
  }
}

template <class Config, tile::Fp8 kLhs, tile::Fp8 kRhs, Epilogue kEpilogue>
__device__ __forceinline__ void consume(const GemmParams& p, const CUtensorMap& out_map,
                                        const Smem<Config>& smem, int rank, int math) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  // This warpgroup's first row inside the block.
  const int row0 = math * Config::kWaves * 64;
  const uint32_t lhs_desc = __shfl_sync(~0u, tile::wgmma_desc(smem.lhs(0) + row0 * 128), 0);
  const uint32_t rhs_desc = __shfl_sync(~0u, tile::wgmma_desc(smem.rhs(0)), 0);
  // Shared addresses in stage 0 of the scale words of this thread's first column and of the class.
  const uint32_t cols_addr = tile::keep(
      tile::smem_addr(smem.scales(0) + Config::kLhsTiles * Config::kTileBytes + 8 * (lane % 4)));
  const uint32_t rhs_class_addr =
      tile::smem_addr(smem.scales(0) + Config::kLhsTiles * Config::kTileBytes + 512);
  Ring<Config::kStages> ring;
  float acc[64];
  for (int index = blockIdx.x / Config::kCluster; index < p.m_blocks * p.n_blocks;
       index += gridDim.x / Config::kCluster) {
    const Block block = block_at(p, index);
    Wave w;
    w.n0 = (block.n * Config::kCluster + rank) * 128;
    w.thread = thread;
    w.barrier = 1 + math;
    w.staging = smem.staging(math);
    w.bias = smem.bias(math);
    if (p.epilogue.bias != nullptr) load_bias(p.epilogue, w);
    // The same inside the block's scale tiles (192 rows start in the middle of a tile every other
    // time), and the shared addresses of what this thread needs of them.
    const int inside = Config::kM == 192 ? row0 + (block.m & 1) * 64 : row0;
    const uint32_t lhs_class_addr = __shfl_sync(
        ~0u, tile::smem_addr(smem.scales(0) + inside / 128 * Config::kTileBytes + 512), 0);
    const uint32_t rows_addr =
        tile::keep(tile::smem_addr(smem.scales(0) + inside / 128 * Config::kTileBytes +
                                   4 * (inside % 128 + warp * 16 + lane / 4)));
    float sum[Config::kWaves][64];
#pragma unroll
    for (int wave = 0; wave < Config::kWaves; ++wave) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[wave][i] = 0.0f;
    }
    for (int k = 0; k < p.k_steps; ++k, ring.next()) {
      const int s = ring.stage;
      const uint32_t lhs = lhs_desc + s * (Config::kLhsBytes / 16),
                     rhs = rhs_desc + s * (Config::kRhsBytes / 16);
      const uint32_t offset = s * Config::kScaleBytes, cols = cols_addr + offset;
      tile::mbar_wait(smem.full(s), ring.phase);
      // NOTE: what the promotion needs from shared memory is read before the products start.
      const uint32_t lhs_class = tile::ld_shared_u32(lhs_class_addr + offset);
      const uint32_t rhs_class = tile::ld_shared_u32(rhs_class_addr + offset);
      uint32_t rows[2 * Config::kWaves];
#pragma unroll
      for (int i = 0; i < 2 * Config::kWaves; ++i) {
        rows[i] = tile::ld_shared_u32(rows_addr + offset + 4 * (8 * (i % 2) + 64 * (i / 2)));
      }
      if ((lhs_class | rhs_class) < 2) {
        const float rhs_scale =
            rhs_class == 0 ? __uint_as_float(tile::ld_shared_u32(rhs_class_addr + offset - 512))
                           : 1.0f;
#pragma unroll
        for (int wave = 0; wave < Config::kWaves; ++wave) {
          const float f0 = __uint_as_float(rows[2 * wave]) * rhs_scale;
          const float f8 = __uint_as_float(rows[2 * wave + 1]) * rhs_scale;
          multiply<kLhs, kRhs, 4>(acc, lhs + wave * (64 * 128 / 16), rhs);
          if (rhs_class == 0) {
            if (wave == Config::kWaves - 1) release<Config>(smem.empty(s), lane);
            promote_tile(sum[wave], acc, f0, f8);
          } else {
            promote_rows(sum[wave], acc, f0, f8, cols);
            if (wave == Config::kWaves - 1) release<Config>(smem.empty(s), lane);
          }
        }
      } else {
        const bool far = lhs_class == 3 || rhs_class == 3;
        const uint32_t scratch = tile::smem_addr(smem.scratch(math));
        if (!far)
          expand_columns(rhs_class_addr + offset - 512, scratch, rhs_class, thread, 1 + math);
#pragma unroll 1
        for (int kk = 0; kk < 4; ++kk) {
          const WordReader reader(lhs_class, kk);
#pragma unroll
          for (int wave = 0; wave < Config::kWaves; ++wave) {
            multiply<kLhs, kRhs, 1>(acc, lhs + wave * (64 * 128 / 16) + 2 * kk, rhs + 2 * kk);
            const uint32_t w0 = rows[2 * wave], w8 = rows[2 * wave + 1];
            if (far) {
              promote_far(sum[wave], acc, w0, w8, cols, reader, WordReader(rhs_class, kk));
            } else {
              promote_rows(sum[wave], acc, reader.scale(w0), reader.scale(w8),
                           scratch + 512 * kk + 8 * (lane % 4));
            }
          }
        }
        release<Config>(smem.empty(s), lane);
      }
    }
#pragma unroll
    for (int wave = 0; wave < Config::kWaves; ++wave) {
      w.m0 = block.m * Config::kM + row0 + wave * 64;
      epilogue_wave<kEpilogue, Config::kSlots>(sum[wave], wave, p.epilogue, &out_map, w);
    }
  }
  if (thread == 0) tile::tma_store_wait_all();
}

template <class Config, tile::Fp8 kLhs, tile::Fp8 kRhs, Epilogue kEpilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ CUtensorMap lhs_map,
                const __grid_constant__ CUtensorMap rhs_map,
                const __grid_constant__ CUtensorMap out_map) {
  extern __shared__ char raw[];
  const Smem<Config> smem(raw);
  const int rank = Config::kCluster == 1 ? 0 : static_cast<int>(tile::cluster_rank());
  if (threadIdx.x == 0) {
    tile::tma_prefetch(&lhs_map);
    tile::tma_prefetch(&rhs_map);
    if (!p.epilogue.direct) tile::tma_prefetch(&out_map);
    for (int s = 0; s < Config::kStages; ++s) {
      tile::mbar_init(smem.full(s), 1);
      tile::mbar_init(smem.empty(s), 4 * Config::kMath * Config::kCluster);
    }
    tile::mbar_init_fence();
  }
  if constexpr (Config::kCluster == 1) {
    __syncthreads();
  } else {
    tile::cluster_sync();
  }
  if (threadIdx.x < 128) {
    tile::registers_down<Config::kMath == 3 ? 32 : 40>();
    if (threadIdx.x < 32 && tile::elect_one()) produce<Config>(p, lhs_map, rhs_map, smem, rank);
    __syncwarp();
  } else {
    tile::registers_up<Config::kMath == 3 ? 160 : 232>();
    consume<Config, kLhs, kRhs, kEpilogue>(
        p, out_map, smem, rank, __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1);
  }
  // NOTE: a CTA must not leave while its neighbour still sends data or arrivals to it.
  if constexpr (Config::kCluster != 1) tile::cluster_sync();
}

}  // namespace te_mx::sm90
