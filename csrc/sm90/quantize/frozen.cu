// Weights that stand still, from codes and scales to tiles and back: te_mx/sm90_frozen.h.
#include "te_mx/sm90_frozen.h"

#include <cuda_runtime_api.h>

#include "common/device.h"
#include "common/launch.h"
#include "mxtile/sm90/barrier.cuh"
#include "quantize/plain_codes.cuh"
#include "quantize/tile_classes.cuh"

namespace te_mx::sm90 {

namespace {

namespace tile = mxtile::sm90;

inline constexpr int kThreads = 256;
using Shift = tile::CodeShift<tile::Fp8::e4m3>;

struct Params {
  FrozenArgs a;
  int64_t tile_ld, scale_ld;  // bytes from a row
  int row_tiles;
  bool vectors;  // rows of codes have 16-byte vectors only
};

// Which part of the matrix belongs to a thread of a tile: 16 codes of each of the rows r + 32 i, at
// k of the tile; 8 lanes hold a row, 2 a block.
struct Place {
  int64_t r0, k0;
  int r, k, rows, ks;  // rows and ks of the tile that exist, from r and k on

  __device__ __forceinline__ explicit Place(const FrozenArgs& a, int row_tiles) {
    const int64_t step = blockIdx.x / row_tiles;
    r0 = (blockIdx.x - step * row_tiles) * kTile, k0 = step * kTile;
    r = threadIdx.x / 8, k = threadIdx.x % 8 * 16;
    rows = static_cast<int>(min(kTile, a.rows - r0)) - r;
    ks = static_cast<int>(min(kTile, a.k - k0)) - k;
  }
  __device__ __forceinline__ int row_tile() const { return static_cast<int>(r0 / kTile); }
  __device__ __forceinline__ int step() const { return static_cast<int>(k0 / kTile); }
  __device__ __forceinline__ int block() const { return k / 32; }
};

// The number of a block in the word of a row that shares exponents, and its byte in one that does
// not; an entry is that of TileScales.
__device__ __forceinline__ uint32_t number_of(uint32_t entry, uint32_t exponent) {
  const uint32_t e = entry & 0xFF, d = exponent - e;
  if (e == 255) return kByteNan;
  if ((entry & kCounts) != 0 || d <= kZerosUpTo) return d;
  return e == 0 ? kByte0 : e == 127 ? kByte127 : kByteAside;
}
__device__ __forceinline__ uint32_t byte_of(uint32_t entry, int cls) {
  const uint32_t e = entry & 0xFF;
  return cls == 2 && (entry & kCounts) == 0 && e != 255 && e > kFarExponent ? 0 : e;
}

// Codes times 2^-d, and which of their bits do not come back.
__device__ __forceinline__ bool shifted(uint32_t (&v)[4], uint32_t (&lost)[4], int d) {
#pragma unroll
  for (int i = 0; i < 4; ++i) lost[i] = v[i];
  Shift{d}.apply(v);
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    lost[i] ^= d == 0 ? v[i] : Shift{-d}.rounded(v[i]);
    any |= lost[i];
  }
  return any != 0;
}

// Bytes that are not zero.
__device__ __forceinline__ int nonzero(uint32_t v) { return __popc(__vcmpgtu4(v, 0)) / 8; }

__device__ __forceinline__ void put_aside(const FrozenArgs& a, int part, int64_t place,
                                          uint32_t byte) {
  if (a.counts == nullptr) return;
  const unsigned long long at = atomicAdd(a.counts + part, 1ull);
  if (at < static_cast<unsigned long long>(a.room)) a.aside[part * a.room + at] = place << 8 | byte;
}

__global__ void __launch_bounds__(kThreads, 4)
    pack_frozen_kernel(const __grid_constant__ Params p) {
  __shared__ TileScales s;
  __shared__ alignas(16) uint8_t slots[kThreads][64];
  __shared__ int count[2];
  tile::await_predecessors();
  const FrozenArgs& a = p.a;
  const Place at(a, p.row_tiles);
  uint32_t v[4][4], e[4];
  load_codes<4, 16>(v, a.codes + (at.r0 + at.r) * a.k + at.k0 + at.k, a.k, 32, at.rows, at.ks,
                    p.vectors, slots[threadIdx.x]);
  {
    const uint8_t* from = a.scales + (at.r0 + at.r) * p.scale_ld + at.k0 / 32 + at.block();
    const int there = at.k - at.k % 32 < at.ks + at.k ? at.rows : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i, from += 32 * p.scale_ld) e[i] = 32 * i < there ? __ldg(from) : 0;
  }
  if (threadIdx.x == 0) s.clear();
  if (threadIdx.x < 2) count[threadIdx.x] = 0;
  ScaleRange range;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t any = (v[i][0] | v[i][1] | v[i][2] | v[i][3]) & 0x7F7F7F7Fu;
    any |= __shfl_xor_sync(~0u, any, 1);
    if (any != 0 && e[i] != 255) e[i] |= kCounts;
    range.add(e[i]);
    if (at.k % 32 == 0) s.blocks[at.block()][at.r + 32 * i] = static_cast<uint16_t>(e[i]);
  }
  s.add_range(range);
  __syncthreads();
  const ScaleRange all = s.range();
  const uint32_t exponent = all.exponent(0);
  int cls = TileScales::early_class(all, kMaxSpread);
  if (threadIdx.x < 128) s.examine(all, threadIdx.x, kMaxSpread, 0);
  __syncthreads();
  if (cls == kUndecided) cls = s.late_class(all);
  // Of an exponent that the tile shares, then of one of each row: how many codes are rounded.
#pragma unroll 1
  for (int shares = 0; shares < 2; ++shares) {
    if (cls != shares) continue;
    int mine = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((e[i] & kCounts) == 0) continue;
      uint32_t w[4], lost[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = v[i][j];
      const uint32_t target = shares == 0 ? exponent : s.target[at.r + 32 * i];
      if (shifted(w, lost, static_cast<int>(target - (e[i] & 0xFF))))
        mine += nonzero(lost[0]) + nonzero(lost[1]) + nonzero(lost[2]) + nonzero(lost[3]);
    }
    if (mine != 0) atomicAdd(&count[shares], mine);
    __syncthreads();
    if (count[shares] >= kMostAside) cls = shares == 0 ? 1 : all.low == 0 ? 3 : 2;
  }

  if (threadIdx.x < 128) {
    const int r = threadIdx.x;
    const uint32_t target = cls == 0 ? exponent : s.target[r];
    uint32_t word = cls < 2 ? (target == 0 ? 0x00400000u : target << 23) : 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t entry = s.blocks[b][r];
      word |= cls < 2 ? number_of(entry, target) << 4 * b : byte_of(entry, cls) << 8 * b;
    }
    const int t = at.row_tile();
    write_words(word, exponent, cls, r, tile_words(a.words, at.step(), t, p.row_tiles),
                t == p.row_tiles - 1 && (p.row_tiles & 1) != 0);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (32 * i >= at.rows || at.ks <= 0) continue;
    const int64_t row = at.r0 + at.r + 32 * i, k = at.k0 + at.k;
    const uint32_t target = cls == 0 ? exponent : s.target[at.r + 32 * i];
    uint32_t lost[4] = {};
    const uint32_t was[4] = {v[i][0], v[i][1], v[i][2], v[i][3]};
    bool any = false;
    if (e[i] == 255) {
#pragma unroll
      for (int j = 0; j < 4; ++j) lost[j] = v[i][j] ^ 0x7F7F7F7Fu, v[i][j] = 0x7F7F7F7Fu;
      any = true;
    } else if (cls < 2 && (e[i] & kCounts) != 0) {
      any = shifted(v[i], lost, static_cast<int>(target - (e[i] & 0xFF)));
    }
    if (any) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll 1
        for (int c = 0; c < 4; ++c) {
          if ((lost[j] >> 8 * c & 0xFF) != 0 && 4 * j + c < at.ks)
            put_aside(a, 0, row * a.k + k + 4 * j + c, was[j] >> 8 * c & 0xFF);
        }
      }
    }
    if (at.k % 32 == 0 && (e[i] & kCounts) == 0 && e[i] != 255 &&
        (cls < 2 ? number_of(e[i], target) == kByteAside : byte_of(e[i], cls) != e[i]))
      put_aside(a, 1, row * p.scale_ld + k / 32, e[i]);
    // Rows start multiples of 16 bytes apart: the last vector may reach into the padding of its
    // row.
    *reinterpret_cast<uint4*>(a.tiles + row * p.tile_ld + k) =
        make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
  }
}

__global__ void __launch_bounds__(kThreads) unpack_frozen_kernel(const __grid_constant__ Params p) {
  tile::await_predecessors();
  const FrozenArgs& a = p.a;
  const Place at(a, p.row_tiles);
  if (at.ks <= 0) return;
  const uint32_t* const words = tile_words(a.words, at.step(), at.row_tile(), p.row_tiles);
  const bool shared = __ldg(words + 128) < 2;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    if (32 * i >= at.rows) return;
    const int64_t row = at.r0 + at.r + 32 * i, k = at.k0 + at.k;
    const uint32_t word = __ldg(words + at.r + 32 * i), number = word >> 4 * at.block() & 0xF;
    const uint4 q = __ldg(reinterpret_cast<const uint4*>(a.tiles + row * p.tile_ld + k));
    uint32_t v[4] = {q.x, q.y, q.z, q.w};
    uint32_t e = word >> 8 * at.block() & 0xFF;
    if (shared) {
      if (number != 0 && number <= kMaxSpread) {
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = Shift{-static_cast<int>(number)}.rounded(v[j]);
      }
      e = number <= kZerosUpTo ? (word >> 23) - number
                               : (number == kByte127   ? 127
                                  : number == kByteNan ? 255
                                                       : 0);
    }
    if (at.k % 32 == 0) a.scales[row * p.scale_ld + k / 32] = static_cast<uint8_t>(e);
    uint8_t* const to = a.codes + row * a.k + k;
    if (p.vectors) {
      *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 16; ++j)
        if (j < at.ks) to[j] = static_cast<uint8_t>(v[j / 4] >> 8 * (j % 4));
    }
  }
}

Status run(void (*kernel)(Params), const FrozenArgs& a) {
  if (a.rows < 0 || a.k < 0 || a.room < 0) return Status::bad_argument;
  if (a.rows == 0 || a.k == 0) return Status::ok;
  if (reinterpret_cast<uintptr_t>(a.tiles) % 16 != 0) return Status::bad_argument;
  const int64_t row_tiles = (a.rows + kTile - 1) / kTile, steps = (a.k + kTile - 1) / kTile;
  if (row_tiles * steps > INT32_MAX) return Status::unsupported;
  Params p{a, packed_ld(a.k), (a.k + 31) / 32, static_cast<int>(row_tiles), false};
  p.vectors = a.k % 16 == 0 && reinterpret_cast<uintptr_t>(a.codes) % 16 == 0;
  // NOTE: who follows may read weights before it waits, so it starts behind this one.
  const auto tiles = static_cast<unsigned>(row_tiles * steps);
  return launch_early(kernel, {tiles, kThreads, a.execution.stream}, p);
}

}  // namespace

Status pack_frozen(const FrozenArgs& args) {
  if (args.room > 0 && (args.counts == nullptr || args.aside == nullptr))
    return Status::bad_argument;
  return run(pack_frozen_kernel, args);
}

Status unpack_frozen(const FrozenArgs& args) { return run(unpack_frozen_kernel, args); }

}  // namespace te_mx::sm90
