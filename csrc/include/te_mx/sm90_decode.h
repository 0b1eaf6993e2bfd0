// The decode layout of weights that stand still, and how a product of a few rows with them is cut
// into pieces. Host code alone, for machines without a GPU too.
//
// Weights [n, k] lie in groups of 16 rows and quads of 128 k (four MX blocks), both padded with
// zeros: [groups][quads][bytes of a quad]. A quad is what lanes of a warp feed to the tensor cores,
// and then its scales:
//   8 bits, 2112 bytes: four blocks of [32 lanes][16 bytes]; lane 4g + t has codes 8t .. 8t + 7 of
//     the block of row g, then those of row g + 8;
//   4 bits, 1088 bytes: four blocks of [32 lanes][8 bytes]; the same codes, eight in a word whose
//     bits lie as the shifts of decode_fragments.cuh want them;
//   64 bytes of scales: [8][8]: at g four bytes of row g, then four of row g + 8.
#pragma once

#include <cstdint>

#include "te_mx/types.h"

namespace te_mx::sm90 {

inline constexpr int kDecodeRows = 16;   // of weights in a group
inline constexpr int kDecodeQuad = 128;  // of k
// Of a CTA: warps that multiply, at most, and threads. All of them quantize; one warp asks for x.
inline constexpr int kDecodeMaxWarps = 15;
inline constexpr int kDecodeThreads = 512;
inline constexpr int kDecodeMaxStages = 8;
inline constexpr int kDecodeSmem = 227 * 1024;

constexpr int decode_quad_bytes(Element element) {
  return kDecodeRows * kDecodeQuad / (element == Element::e2m1 ? 2 : 1) + 64;
}
constexpr int64_t decode_groups(int64_t n) { return (n + kDecodeRows - 1) / kDecodeRows; }
constexpr int64_t decode_quads(int64_t k) { return (k + kDecodeQuad - 1) / kDecodeQuad; }
constexpr int64_t decode_bytes(int64_t n, int64_t k, Element element) {
  return decode_groups(n) * decode_quads(k) * decode_quad_bytes(element);
}

// How a product is cut: a cluster of CTAs has `groups` groups of weights, each of its CTAs a slice
// of k in `parts` parts, and every warp of a CTA two groups and a part. Sums of parts are added up
// in order, so results depend on the split, and the split on n and k alone.
struct DecodeSplit {
  int cluster = 1;
  int parts = 1;
  int groups = 1;
  constexpr int pairs() const { return (groups + 1) / 2; }
  constexpr int warps() const { return pairs() * parts; }  // at most kDecodeMaxWarps
};
DecodeSplit decode_split(int64_t n, int64_t k, int sms);

// Bytes of a quad of x for `rows` rows: fp16 numbers [4 blocks][rows][32], fp32 scales [4][rows].
constexpr int decode_input_bytes(int rows) { return rows * (kDecodeQuad * 2 + 4 * 4); }

// What of shared memory goes where, for so many rows of x: depends on the split, and no result on
// it.
struct DecodeRoom {
  int stage_quads = 0, stages = 0;  // of every warp's ring, of two groups; 0: no room
  int input_stages = 0;             // of x, where it comes in steps; 0: all of the slice is there
  int x_at = 0, sums_at = 0, bars_at = 0, bytes = 0;
};
// x of a slice is there (resident), or comes in steps of a quad for every part.
DecodeRoom decode_room(const DecodeSplit& split, int64_t k, int rows, Element element,
                       bool resident);

// out[m, n] = x[m, k] @ w[n, k]^T + bias in one launch. x are values, quantized on the way in to
// the bytes of quantize(), or of 16 bits as they are; or plain codes with their scales.
struct DecodeArgs {
  int64_t m = 0, n = 0, k = 0;
  const uint8_t* w = nullptr;  // in the decode layout, aligned to 16 bytes
  Element w_element = Element::e4m3;
  const void* x = nullptr;  // [m, k], rows ldx elements apart
  int64_t ldx = 0;
  DType x_dtype = DType::bf16;
  bool x_as_is = false;
  const uint8_t* x_scales = nullptr;  // of codes, [m, ceil(k/32)]; null: x are values
  Element x_element = Element::e4m3;  // E4M3 or E5M2
  ScaleRule rule = ScaleRule::rceil;
  void* out = nullptr;  // rows ldo apart
  int64_t ldo = 0;
  DType out_dtype = DType::bf16;
  const void* bias = nullptr;  // [n] or null
  DType bias_dtype = DType::bf16;
  Execution execution;
};
// unsupported: inputs of 8 rows have no room in shared memory, from k of about 100000 on.
// Workspace, aligned to 16 bytes: decode_workspace(m, k).
Status decode(const DecodeArgs& args);
int64_t decode_workspace(int64_t m, int64_t k);

}  // namespace te_mx::sm90
