// A tile of an operand as the tensor cores read it, made inside the main loop of its plain codes of
// 4 bits: a warpgroup has a row a thread. Classes, words and codes are those of pack_kernel.cuh.
#pragma once

#include <cstdint>

#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/copy_async.cuh"
#include "mxtile/sm90/fp4.cuh"
#include "mxtile/sm90/swizzle.cuh"
#include "quantize/plain_codes.cuh"
#include "quantize/tile_classes.cuh"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

inline constexpr int kUnpackWarps = 4;                    // of one operand
inline constexpr int kRawRowBytes = 64;                   // 128 codes, under the 64-byte swizzle
inline constexpr int kRawTileBytes = 128 * kRawRowBytes;  // of one step
inline constexpr int kSeenBytes = 2 * 4 * kUnpackWarps;   // of two steps: see TileOfRows

// What becomes of codes for every Fp4Table(u), and of those of a block of NaN: codes of NaN of both
// signs. In shared memory, where 16 tables lie in 32 banks: making one takes more instructions.
inline constexpr int kFp4Tables = 16, kNanTable = 15;
inline constexpr uint32_t kEveryBlock = 0x01010101u;
__device__ __forceinline__ void make_table(uint2* tables, int u) {
  const tile::Fp4Table table(u);
  tables[u] =
      u == kNanTable ? make_uint2(0x7F7F7F7Fu, 0x7F7F7F7Fu) : make_uint2(table.low, table.high);
}

// Four blocks of one row: 32 codes each, and of each a byte, the first block lowest.
struct RowOfBlocks {
  uint4 codes[4];
  uint32_t scales;
  uint32_t counts, nan;  // 0xFF of blocks that count, and of those of NaN

  // From a tile under the 64-byte swizzle, whose chunk 0 of the row is at `first_chunk`.
  __device__ __forceinline__ void read(int b, uint32_t first_chunk) {
    codes[b] = tile::ld_shared_u32x4(first_chunk ^ 16 * b);
  }
  __device__ __forceinline__ void read(uint32_t first_chunk) {
#pragma unroll
    for (int b = 0; b < 4; ++b) read(b, first_chunk);
  }
  __device__ __forceinline__ void judge(uint32_t scale_bytes) {
    uint32_t any = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint4 q = codes[b];
      any |= min((q.x | q.y | q.z | q.w) & 0x77777777u, 1u) << 8 * b;
    }
    scales = scale_bytes;
    nan = (((((scales & 0x7F7F7F7Fu) + kEveryBlock) & scales) >> 7) & kEveryBlock) * 0xFF;
    counts = (any * 0xFF) & ~nan;
  }
  __device__ __forceinline__ ScaleRange range() const {
    const uint32_t high = scales & counts, low_key = ~scales & counts;
    // A block each: its byte of `high` twice and that of `low_key` twice, in the same order.
    const uint32_t most =
        __vmaxu2(__vmaxu2(__byte_perm(high, low_key, 0x4400), __byte_perm(high, low_key, 0x5511)),
                 __vmaxu2(__byte_perm(high, low_key, 0x6622), __byte_perm(high, low_key, 0x7733)));
    return {most & 0xFF, counts == 0 ? 256 : 255 - (most >> 24)};
  }
};

// What the rows of a tile decide together.
struct TileOfRows {
  int cls;
  uint32_t exponent;  // of the tile
  uint32_t target;    // what the blocks of this thread's row share in class 0 and 1

  // Says what a thread's row has, in `seen`, which has a place for every warp.
  static __device__ __forceinline__ void say(const ScaleRange& row, uint32_t seen, int thread) {
    const bool far_apart = !row.empty() && row.high - row.low > tile::kFp4Spread;
    const uint32_t ragged = __any_sync(~0u, far_apart) ? 1u << 31 : 0;
    const uint32_t high = __reduce_max_sync(~0u, row.high);
    const uint32_t low_key = __reduce_max_sync(~0u, 511 - row.low);
    if (thread % 32 == 0)
      tile::st_shared_u32(seen + thread / 32 * 4, high | low_key << 16 | ragged);
  }

  // After a barrier of the warpgroup. Places may be written again after the next one.
  __device__ __forceinline__ TileOfRows(const ScaleRange& row, uint32_t seen) {
    const uint4 by_warp = tile::ld_shared_u32x4(seen);
    const uint32_t any = by_warp.x | by_warp.y | by_warp.z | by_warp.w;
    const uint32_t most = __vmaxu2(__vmaxu2(by_warp.x & ~(1u << 31), by_warp.y & ~(1u << 31)),
                                   __vmaxu2(by_warp.z & ~(1u << 31), by_warp.w & ~(1u << 31)));
    const ScaleRange all{most & 0xFFFF, 511 - (most >> 16)};
    exponent = all.exponent(tile::kFp4Headroom);
    cls = TileScales::early_class(all, tile::kFp4Spread);
    if (cls == kUndecided) cls = (any >> 31) == 0 ? 1 : (all.low == 0 ? 3 : 2);
    target = cls == 0 || row.empty() ? exponent : ScaleRange::below(row.high, tile::kFp4Headroom);
  }

  // The scale word of the row.
  __device__ __forceinline__ uint32_t word(const RowOfBlocks& row) const {
    if (cls < 2) return target == 0 ? 0x00400000u : target << 23;
    return row.scales & (row.counts | row.nan);
  }

  // Writes the codes of the row to a tile under the 128-byte swizzle, and reads those at `next`
  // (see RowOfBlocks::read) in their place, so that nobody waits for them.
  __device__ __forceinline__ void write(RowOfBlocks& row, uint32_t tables, uint32_t to, int r,
                                        uint32_t next) const {
    const uint32_t first_chunk = to + tile::swizzle128(r, 0);
    // Eight times the number of the table of every block. Blocks of zeros may have any but NaN's.
    uint32_t u = kEveryBlock * tile::kFp4Headroom;
    if (cls < 2)
      u = (kEveryBlock * (tile::kFp4Headroom + target) - (row.scales & row.counts)) & row.counts;
    u = (u | (row.nan & kEveryBlock * kNanTable)) << 3;
    uint2 of_block[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) of_block[b] = tile::ld_shared_u32x2(tables + (u >> 8 * b & 0xFF));
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const tile::Fp4Table table(of_block[b]);
      const uint4 q = row.codes[b];
      row.read(b, next);
      uint32_t first[4], second[4];
      fp4_to_fp8(first, q.x, q.y, table);
      fp4_to_fp8(second, q.z, q.w, table);
      tile::st_shared_u32x4(first_chunk ^ 32 * b,
                            make_uint4(first[0], first[1], first[2], first[3]));
      tile::st_shared_u32x4(first_chunk ^ (32 * b + 16),
                            make_uint4(second[0], second[1], second[2], second[3]));
    }
  }
};

// The scales of a plain operand, [rows, blocks].
struct PlainScales {
  const uint8_t* at;
  int rows, blocks;
  bool vectors;  // rows start at 16 bytes and have whole 16 bytes
};

// Scales of one row of a block of D after another, on their way to shared memory 16 bytes (four
// steps) at a time, before they are needed. What a thread asks for only it reads.
inline constexpr int kScaleChunks = 3;  // in shared memory: one more than are on their way
inline constexpr int kScaleStreamBytes = kScaleChunks * 128 * 16;

template <class Schedule>
class ScaleStream {
 public:
  // `row0(at)`: the first row of the operand in a block.
  template <class Params, class Row0>
  __device__ __forceinline__ ScaleStream(const Params& p, const PlainScales& scales, char* slots,
                                         int thread, const Row0& row0)
      : schedule_(p), scales_(scales), slots_(slots + 16 * thread), thread_(thread) {
#pragma unroll
    for (int i = 0; i < kScaleChunks - 1; ++i) ask(row0);
  }

  // Scales of the row at a step, which follows the one of the last call; `first` of a block.
  template <class Row0>
  __device__ __forceinline__ uint32_t at(int step, bool first, const Row0& row0) {
    if (first || step % 4 == 0) {
      tile::wait_copy_groups<kScaleChunks - 2>();
      four_ = tile::ld_shared_u32x4(tile::smem_addr(slots_ + read_ * (128 * 16)));
      read_ = next(read_);
      ask(row0);
    }
    const uint32_t low = step & 1 ? four_.y : four_.x, high = step & 1 ? four_.w : four_.z;
    return step & 2 ? high : low;
  }

 private:
  static __device__ __forceinline__ int next(int slot) {
    return slot == kScaleChunks - 1 ? 0 : slot + 1;
  }

  template <class Row0>
  __device__ __forceinline__ void ask(const Row0& row0) {
    if (chunk_ == last_) {
      typename Schedule::Place at;
      if (!schedule_.take(at)) {
        tile::end_copy_group();
        return;
      }
      chunk_ = at.first / 4, last_ = (at.end + 3) / 4;
      const int row = row0(at) + thread_;
      from_ =
          row < scales_.rows ? scales_.at + static_cast<int64_t>(row) * scales_.blocks : nullptr;
    }
    char* const to = slots_ + write_ * (128 * 16);
    if (scales_.vectors) {
      const bool there = from_ != nullptr;
      tile::copy16_async(to, there ? from_ + 16 * chunk_ : scales_.at, there);
    } else {
      copy_bytes(to);
    }
    tile::end_copy_group();
    write_ = next(write_), ++chunk_;
  }

  __device__ __forceinline__ void copy_bytes(char* to) const {
    const int left = from_ != nullptr ? scales_.blocks - 16 * chunk_ : 0;
#pragma unroll 1
    for (int word = 0; word < 4; ++word) {
      uint32_t v = 0;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int b = 4 * word + i;
        if (b < left) v |= static_cast<uint32_t>(__ldg(from_ + 16 * chunk_ + b)) << 8 * i;
      }
      tile::st_shared_u32(tile::smem_addr(to) + 4 * word, v);
    }
  }

  Schedule schedule_;
  const PlainScales& scales_;
  char* slots_;
  int thread_;
  const uint8_t* from_ = nullptr;
  int chunk_ = 0, last_ = 0, read_ = 0, write_ = 0;
  uint4 four_;
};

}  // namespace te_mx::sm90
