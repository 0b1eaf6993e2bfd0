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
  uint32_t counts, nan;  // 0xFF of blocks that count, and of those of NaN: after judge()

  // From a tile under the 64-byte swizzle, whose chunk 0 of the row is at `first_chunk`.
  __device__ __forceinline__ void read(int b, uint32_t first_chunk) {
    codes[b] = tile::ld_shared_u32x4(first_chunk ^ 16 * b);
  }
  __device__ __forceinline__ void read(uint32_t first_chunk) {
#pragma unroll
    for (int b = 0; b < 4; ++b) read(b, first_chunk);
  }
  __device__ __forceinline__ void judge() {
    uint32_t any = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint4 q = codes[b];
      any |= min((q.x | q.y | q.z | q.w) & 0x77777777u, 1u) << 8 * b;
    }
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

  // Numbers of the tables of the row's blocks. Blocks of zeros may have any but NaN's.
  __device__ __forceinline__ uint32_t tables(const RowOfBlocks& row) const {
    uint32_t u = kEveryBlock * tile::kFp4Headroom;
    if (cls < 2)
      u = (kEveryBlock * (tile::kFp4Headroom + target) - (row.scales & row.counts)) & row.counts;
    return u | (row.nan & kEveryBlock * kNanTable);
  }
};

// Writes the codes of a row to a tile under the 128-byte swizzle, by the tables `u` of its blocks,
// and reads those at `next` (see RowOfBlocks::read) in their place, so that nobody waits for them.
__device__ __forceinline__ void write_row(RowOfBlocks& row, uint32_t u, uint32_t tables,
                                          uint32_t to, int r, uint32_t next) {
  const uint32_t first_chunk = to + tile::swizzle128(r, 0);
  u <<= 3;
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
    tile::st_shared_u32x4(first_chunk ^ 32 * b, make_uint4(first[0], first[1], first[2], first[3]));
    tile::st_shared_u32x4(first_chunk ^ (32 * b + 16),
                          make_uint4(second[0], second[1], second[2], second[3]));
  }
}

// What the scales of a tile say before anybody has seen its codes: where all blocks, those of zeros
// too, are near enough to each other, it is of class 0 and of this exponent. (Blocks of zeros may
// make it another one than TileOfRows says. Then all codes are other multiples of the same numbers
// and sums are the same: scales near the ends of the range, where they might not be, are left to
// the codes.)
//
// kDecided | the exponent, or 0 where the codes decide. By a warp, of four rows a lane; those exist
// that have a bit in `rows`, in every lane if kWhole.
inline constexpr uint32_t kDecided = 1u << 31;

template <bool kWhole>
__device__ __forceinline__ uint32_t decide(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3,
                                           uint32_t rows) {
  const uint32_t w[4] = {w0, w1, w2, w3};
  const auto ends = ScaleEnds::of<kWhole>(w, rows);
  return ends.share(tile::kFp4Spread) ? kDecided | ends.exponent() : 0;
}

// The scales of a plain operand, [rows, blocks].
struct PlainScales {
  const uint8_t* at;
  int rows, blocks;
  bool vectors;  // rows start at 16 bytes and have whole 16 bytes
};

// Scales of the rows of a block of D, one block after another, on their way to shared memory 16
// bytes (four steps) of a row at a time, before they are needed. A lane of a warp has every 32nd
// row. They stay there for some more such pieces.
inline constexpr int kScaleChunks = 5, kScaleChunksAhead = 2;
inline constexpr int kScaleChunkBytes = 128 * 16,
                     kScaleStreamBytes = kScaleChunks * kScaleChunkBytes;

template <class Schedule>
class ScaleStream {
 public:
  // `row0(at)`: the first row of the operand in a block.
  template <class Params, class Row0>
  __device__ __forceinline__ ScaleStream(const Params& p, const PlainScales& scales, char* slots,
                                         int lane, const Row0& row0)
      : schedule_(p), scales_(scales), slots_(slots), lane_(lane) {
#pragma unroll 1
    for (int i = 0; i < kScaleChunksAhead; ++i) ask(row0);
  }

  // Scales of this lane's rows at steps 2 * pair and 2 * pair + 1, which follow those of the last
  // call; `next_piece` where they are the first of a block or of 16 bytes, which overwrites those
  // of kScaleChunks - kScaleChunksAhead pieces before. Returns where those of the first row's first
  // step are in the slots.
  template <class Row0>
  __device__ __forceinline__ uint32_t at(uint2 (&words)[4], int pair, bool next_piece,
                                         const Row0& row0) {
    if (next_piece) {
      read_ = next(read_);
      ask(row0);
      tile::wait_copy_groups<kScaleChunksAhead>();
    }
    const uint32_t offset = read_ * kScaleChunkBytes + 8 * (pair % 2);
    const uint32_t from = tile::smem_addr(slots_) + offset + 16 * lane_;
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = tile::ld_shared_u32x2(from + 32 * 16 * i);
    return offset;
  }
  // Bit i: whether this lane's row i exists in a block.
  __device__ __forceinline__ uint32_t rows(int row0) const {
    const int left = scales_.rows - row0 - lane_;
    return left > 96 ? 15u : (1u << (left + 31) / 32) - 1;
  }

 private:
  static __device__ __forceinline__ int next(int slot) {
    return slot == kScaleChunks - 1 ? 0 : slot + 1;
  }

  template <class Row0>
  __device__ __forceinline__ void ask(const Row0& row0) {
    char* to = slots_ + write_ * kScaleChunkBytes + 16 * lane_;
    write_ = next(write_);
    if (left_ == 0) {
      typename Schedule::Place at;
      if (!schedule_.take(at)) {
        tile::end_copy_group();
        return;
      }
      const int chunk = at.first / 4, row = row0(at) + lane_;
      left_ = (at.end + 3) / 4 - chunk, blocks_ = scales_.blocks - 16 * chunk;
      there_ = rows(row0(at));
      from_ = scales_.at + static_cast<int64_t>(row) * scales_.blocks + 16 * chunk;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i, to += 32 * 16) {
      const bool there = there_ >> i & 1;
      const uint8_t* const from = from_ + static_cast<int64_t>(i) * 32 * scales_.blocks;
      if (scales_.vectors) {
        tile::copy16_async(to, there ? from : scales_.at, there);
      } else {
        copy_bytes(to, from, there ? blocks_ : 0);
      }
    }
    tile::end_copy_group();
    --left_, blocks_ -= 16, from_ += 16;
  }

  static __device__ __forceinline__ void copy_bytes(char* to, const uint8_t* from, int left) {
#pragma unroll 1
    for (int word = 0; word < 4; ++word) {
      uint32_t v = 0;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int b = 4 * word + i;
        if (b < left) v |= static_cast<uint32_t>(__ldg(from + b)) << 8 * i;
      }
      tile::st_shared_u32(tile::smem_addr(to) + 4 * word, v);
    }
  }

  Schedule schedule_;
  const PlainScales& scales_;
  char* slots_;
  const uint8_t* from_ = nullptr;
  int lane_, left_ = 0, blocks_ = 0;
  uint32_t there_ = 0;
  int read_ = kScaleChunks - 1, write_ = 0;
};

}  // namespace te_mx::sm90
