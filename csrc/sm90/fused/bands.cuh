// Order of work for kernels that read a matrix twice: statistics of whole rows, then tiles of 128 x
// 128 that need them. Both run in one kernel, so that the second read finds the rows in L2.
//
// Row tiles are walked in bands. CTAs take items in the order of tickets:
//   statistics of the first `lag` bands, then for each band: its tiles, statistics of the band
//   `lag` later
// A tile waits until the statistics of its band are complete. Their tickets are lower, so they run
// or have run: nobody waits for work that nobody started.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"
#include "quantize/quantize_scan.cuh"

namespace te_mx::sm90 {

inline constexpr int kStatRows = 8;  // in one item: a warp each

struct Bands {
  uint32_t* ws;  // tickets handed out, then rows done of every band; all 0 at the start
  int bands, lag;
  int stats, tiles;  // items of each kind in a band
  int band_bits;     // 2^band_bits row tiles in a band
  int64_t rows;
};

struct BandItem {
  bool stats;
  int band, index;

  // Row tile and column tile.
  __device__ __forceinline__ int row_tile(const Bands& b) const {
    return (band << b.band_bits) + (index & ((1 << b.band_bits) - 1));
  }
  __device__ __forceinline__ int col_tile(const Bands& b) const { return index >> b.band_bits; }
  // The row whose statistics this warp makes.
  __device__ __forceinline__ int64_t row(const Bands& b) const {
    return (static_cast<int64_t>(band) << b.band_bits) * 128 + index * kStatRows + threadIdx.x / 32;
  }
};

// The CTA's item; the whole CTA calls it, `shared` is a word of shared memory.
__device__ __forceinline__ BandItem take_item(const Bands& b, uint32_t& shared) {
  if (threadIdx.x == 0) shared = atomicAdd(b.ws, 1u);
  __syncthreads();
  int ticket = static_cast<int>(shared);
  const int first = b.lag * b.stats;
  if (ticket < first) return {true, ticket / b.stats, ticket % b.stats};
  ticket -= first;
  const int band = ticket / (b.tiles + b.stats), index = ticket % (b.tiles + b.stats);
  if (index < b.tiles) return {false, band, index};
  return {true, band + b.lag, index - b.tiles};
}

// The statistics of a row of a band are written, by the thread that calls it.
__device__ __forceinline__ void publish(const Bands& b, int band) {
  __threadfence();
  atomicAdd(b.ws + 1 + band, 1u);
}

// Waits for the statistics of a band; the whole CTA calls it. They must be read past L1.
__device__ __forceinline__ void await(const Bands& b, int band) {
  if (threadIdx.x == 0) {
    const int64_t left = b.rows - (static_cast<int64_t>(band) << b.band_bits) * 128;
    const int most = 128 << b.band_bits;
    const uint32_t needed = static_cast<uint32_t>(left < most ? left : most);
    while (*static_cast<volatile uint32_t*>(b.ws + 1 + band) < needed) __nanosleep(100);
    __threadfence();
  }
  __syncthreads();
}

// Bands of a matrix [rows, cols] whose rows of two tiles are read twice, `bytes` an element.
inline Status make_bands(Bands& b, uint32_t* ws, int64_t rows, int64_t cols, int bytes,
                         unsigned& ctas) {
  constexpr int64_t kBandBytes = 4 << 20;  // a fraction of L2
  // Items between the statistics of a band and its tiles: about as many as run at a time.
  constexpr int kAhead = 528;
  const int64_t row_tiles = (rows + 127) / 128, col_tiles = (cols + 127) / 128;
  int bits = 0;
  while (bits < 3 && (1 << bits) < row_tiles && (256ll << bits) * cols * bytes <= kBandBytes)
    ++bits;
  const int64_t bands = (row_tiles + (1 << bits) - 1) >> bits;
  const int stats = (128 << bits) / kStatRows;
  const int64_t each = stats + (col_tiles << bits);
  const int64_t ahead = 1 + (kAhead + each - 1) / each, lag = bands < ahead ? bands : ahead;
  const int64_t items = bands * each + (lag - 1) * stats;
  if (items > INT32_MAX) return Status::unsupported;
  b = {ws,
       static_cast<int>(bands),
       static_cast<int>(lag),
       stats,
       static_cast<int>(col_tiles << bits),
       bits,
       rows};
  ctas = static_cast<unsigned>(items);
  return Status::ok;
}

// The counters of a call: those of its workspace, which is zeros, or `counters`, whatever they are.
// NOTE: a quantizer that ran before has cleared a workspace in passing; a memset is a launch.
inline uint32_t* counters_of(const Execution& execution, uint32_t* counters, int64_t words) {
  if (counters != nullptr) return counters;
  return execution.workspace_bytes < words * 4 ? nullptr
                                               : static_cast<uint32_t*>(execution.workspace);
}
inline Status clear_bands(const Bands& b, const uint32_t* counters, cudaStream_t stream) {
  if (counters == nullptr) return Status::ok;
  return started(cudaMemsetAsync(b.ws, 0, (1 + b.bands) * sizeof(uint32_t), stream));
}

}  // namespace te_mx::sm90
