// Weights as operand A of wgmma from registers, as codes or converted to fp16, exactly; and their
// scales on the way from wherever they lie.
#pragma once

#include <cstdint>

#include "mxtile/sm90/copy_async.cuh"
#include "mxtile/sm90/mma.cuh"
#include "mxtile/sm90/shared.cuh"
#include "mxtile/sm90/swizzle.cuh"
#include "mxtile/sm90/wgmma_registers.cuh"
#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

// Codes of a lane over a quad, 16 rows of 128 bytes under their swizzle: of two rows, block by
// block.
struct QuadCodes {
  static constexpr tile::Fp8 kCodes = Element::e4m3;  // that the tensor cores see
  uint32_t at;                                        // of the lane's first 16 bytes

  // Bytes from a quad to a lane's part of it.
  static __device__ __forceinline__ uint32_t offset(int lane) {
    const uint32_t row = lane % 16, chunk = lane / 16;
    return tile::swizzle128(row, chunk);
  }
  // Block b as operand A.
  __device__ __forceinline__ void operand(int b, uint32_t (&a)[4]) {
    tile::ldmatrix_x4(a, at ^ (b << 5));
  }
};

// Codes of a block as two operands of fp16. NOTE: their k lie as x does (decode_input.cuh): the
// first two of four of all lanes, then the others.
template <tile::Fp8 kCodes>
__device__ __forceinline__ void halves_of_codes(const uint32_t (&c)[4], int h, uint32_t (&a)[4]) {
  tile::fp8x4_to_halves<kCodes>(c[2 * h], a[0], a[2]);
  tile::fp8x4_to_halves<kCodes>(c[2 * h + 1], a[1], a[3]);
}

// How scales of weights lie.
enum class ScaleKind : int32_t {
  words,      // of tiles, with their class
  bytes,      // of blocks, four of a quad in a word
  odd_bytes,  // rows of which start anywhere
  factors,    // fp32
};
struct WeightScales {
  const uint8_t* from = nullptr;
  int64_t matrix = 0, quad = 0, tile = 0, row = 0;  // bytes from one to the next; tile: of 128 rows
  ScaleKind kind = ScaleKind::bytes;
  int blocks = 0;  // of bytes in a row

  __device__ __forceinline__ const uint8_t* of_tile(int group_of_rows, int q, int r) const {
    return from + group_of_rows * matrix + q * quad + r / 128 * tile;
  }
  __device__ __forceinline__ const uint8_t* at(int group_of_rows, int q, int r) const {
    return of_tile(group_of_rows, q, r) + r % 128 * row;
  }
  // The bytes of quad q of a row, 0 where there are no more blocks.
  __device__ __forceinline__ uint32_t odd_word(const uint8_t* from, int q) const {
    uint32_t w = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b)
      if (4 * q + b < blocks) w |= uint32_t{__ldg(from + b)} << 8 * b;
    return w;
  }
};

// Bytes of 255 as bit 7 of their places, others as 0: of all that there are these alone have their
// three upper bits.
__device__ __forceinline__ uint32_t bytes_of_ones(uint32_t w) {
  return w & w << 1 & w << 2 & 0x80808080u;
}

// 2^(byte - 127) of byte b of four, a constant. NOTE: bytes of blocks with other codes than zero
// are 24 .. 215, or 255 (te_mx/sm90_decode.h). So the sum of a block times such a scale neither
// overflows nor loses bits. Rows with a 255 are made NaN altogether.
__device__ __forceinline__ float scale_of(uint32_t w, int b) {
  return __uint_as_float((b < 3 ? w << (23 - 8 * b) : w >> 1) & 0x7F800000u);
}

// Scales of a warp's group of rows on their way: chunks of four quads, in which lane 8q + g asks
// for those of rows g and g + 8 over quad q.
template <bool kFactors>
struct ScaleRing {
  uint32_t at;          // shared address of the warp's
  const uint8_t* from;  // of row g of the lane's quad in the chunk that is asked for next

  // Of group `group` of a matrix; `q`: the first quad of the chunk that is asked for next.
  __device__ __forceinline__ ScaleRing(const WeightScales& s, uint32_t at, int matrix, int group,
                                       int q, int lane)
      : at(at) {
    const int row = group * kDecodeRows + lane % 8;
    from = s.at(matrix, q + lane / 8, row);
  }

  // Where the scales of quad i lie: [8][2], of row g and of row g + 8.
  __device__ __forceinline__ uint32_t place(int i) const {
    return at + (i & (2 * kDecodeChunk - 1)) * kDecodeRows * 4;
  }
  // Asks for the chunk that starts with quad i of a part, of which `quads` are left, by lanes whose
  // rows are among the n that there are; `q`: that quad's number.
  __device__ __forceinline__ void ask(const WeightScales& s, int group, int n, int i, int quads,
                                      int q, int lane) {
    const int rows = n - group * kDecodeRows - lane % 8;
    const uint32_t to = place(i) + lane * 8;
    const uint8_t* const high = from + 8 * s.row;
    if (lane / 8 < quads && rows > 0) {
      if (s.kind == ScaleKind::odd_bytes) {
        tile::st_shared_u32(to, s.odd_word(from, q + lane / 8));
        if (rows > 8) tile::st_shared_u32(to + 4, s.odd_word(high, q + lane / 8));
      } else {
        tile::copy4_async(to, from);
        if (rows > 8) tile::copy4_async(to + 4, high);
        if (s.kind == ScaleKind::words)
          tile::copy4_async(classes() + 4 * lane,
                            from + 4 * (kTileRows - group % 8 * kDecodeRows - lane % 8));
      }
    }
    tile::end_copy_group();
    from += kDecodeChunk * s.quad;
  }
  // Makes a chunk that was asked for one of scale bytes, or of factors. By the whole warp, as the
  // other.
  __device__ __forceinline__ void take(const WeightScales& s, int i, int lane) const {
    tile::wait_copy_groups<0>();
    if constexpr (!kFactors) {
      if (s.kind == ScaleKind::words && tile::ld_shared_u32(classes() + 4 * lane) < 2) {
        // NOTE: the low bits of an aligned tile's words may say how to unpack its codes.
        const uint32_t own = place(i) + lane * 8;
        const uint2 w = tile::load_shared8(own);
        tile::st_shared_u32x2(own, (w.x >> 23) * 0x01010101u, (w.y >> 23) * 0x01010101u);
      }
    }
    __syncwarp();
  }

 private:
  static constexpr int kTileRows = 128;
  __device__ __forceinline__ uint32_t classes() const { return at + 2 * kDecodeChunkBytes; }
};

}  // namespace te_mx::sm90
