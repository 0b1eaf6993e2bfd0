// Activations and their derivatives, quantized as they are computed: tiles of 128 x 128 of the
// result, as in the quantizer.
#pragma once

#include "fused/activation.cuh"
#include "fused/fused_patch.cuh"
#include "fused/fused_task.h"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

struct ActParams {
  FactorParams q;
  GroupTable groups;  // of none: rows are not grouped
  Rows h, grad;
  int64_t cols;  // of the activated values; gates start there in h
  ActWords act;
  void* out;
  bool vectors;   // inputs have 16-byte vectors of 8 elements only, aligned
  bool halves;    // of a gated derivative: a tile and its twin in the other half at once
  bool in_pairs;  // gates lie behind what they belong to
};

// ----------------------------------------------------------------------------------------- forward
template <class T, tile::Fp8 kFmt, Sink kSink>
__global__ void __launch_bounds__(kQuantizeThreads, sizeof(T) == 2 ? 4 : 2)
    act_kernel(const __grid_constant__ ActParams p) {
  extern __shared__ __align__(16) char smem[];
  auto& s = *reinterpret_cast<SinkSmem<T, kSink>*>(smem);
  uint4* const slot = own_slots(s);
  uint4* const gate_slot = slot + kSlotChunks<T> * kChunkStep;
  Tile t;
  tile::let_dependents_start();
  tile::await_predecessors();
  if (!find_rows(t, p.q, p.groups)) return;
  const Place at;
  const Extent e(p.q, t, at);
  const T* const row = static_cast<const T*>(p.h.data) + (t.r0 + at.r) * p.h.stride;
  const int64_t col = t.c0() + at.c;
  if (p.in_pairs) {
    const Extent all(e.rows, 2 * e.cols), rest(e.rows, 2 * e.cols - 8);
    fill_slot<T>(slot, row + 2 * col, p.h.stride, all, p.vectors);
    fill_slot<T>(gate_slot, row + 2 * col + 8, p.h.stride, rest, p.vectors);
  } else {
    fill_slot<T>(slot, row + col, p.h.stride, e, p.vectors);
    if (p.act.gated) fill_slot<T>(gate_slot, row + col + p.cols, p.h.stride, e, p.vectors);
  }
  const OutRows<T> out(p.out, p.cols, t.r0 + at.r, t.c0() + at.c);
  wait_for_slots();
  if (p.in_pairs) part_pairs<T>(slot, gate_slot);
  with_activation<sizeof(T) == 4>(p.act, [&](const auto& act) {
#pragma unroll 1
    for (int k = 0; k < 8; ++k) {
      float v[8];
      read_slot<T>(v, slot, k);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = act(v[j]).value;
      if (p.act.gated) {
        float b[8];
        read_slot<T>(b, gate_slot, k);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = mul(v[j], act.gate(b[j]));
      }
      finish_row<T>(slot, k, v, e, out);
    }
  });
  quantize_slot<T, T, kFmt, kSink>(s, p.q, slot, t);
}

// ---------------------------------------------------------------------------------------- backward
// What a thread reads for its columns of the gradient of h: activated columns through a slot; gates
// through another, and then the gradient through registers, two rows ahead; or else the gradient
// through the other slot. Bit j of `gates` is set where column j is one of the gates' gradient,
// made of the same inputs as its twin, `cols` before.
template <class T>
struct BackwardInputs {
  const T* h;  // of the first column's twin in the first half, as grad
  const T* grad;
  int64_t cols;
  uint32_t gates;
  bool vectors;

  __device__ __forceinline__ BackwardInputs(const ActParams& p, int64_t row, int64_t col)
      : cols(p.cols), gates(0), vectors(p.vectors) {
    if (p.act.gated && !p.halves) {
#pragma unroll
      for (int j = 0; j < 8; ++j) gates |= static_cast<uint32_t>(col + j >= cols) << j;
    }
    if (gates & 1) col -= cols;
    h = static_cast<const T*>(p.h.data) + row * p.h.stride + col;
    grad = static_cast<const T*>(p.grad.data) + row * p.grad.stride + col;
  }

  // Column j from the first one on.
  __device__ __forceinline__ int64_t at(int j) const {
    return (gates & 1) == 0 && (gates >> j & 1) != 0 ? j - cols : j;
  }

  __device__ __forceinline__ void fill(uint4* slot, uint4* other, const ActParams& p,
                                       const Extent& e) const {
    const T* const second = p.act.gated ? h + cols : grad;
    const int64_t stride = p.act.gated ? p.h.stride : p.grad.stride;
    if (vectors) {
      fill_slot<T>(slot, h, p.h.stride, e, true);
      fill_slot<T>(other, second, stride, e, true);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < 64; ++i) {
      const int k = i / 8, j = i % 8;
      const bool exists = k < e.rows && j < e.cols;
      constexpr int kOfChunk = 16 / sizeof(T);
      const int chunk = (k * Input<T>::kVectors + j / kOfChunk) * kChunkStep;
      const T zero = static_cast<T>(0.0f);
      reinterpret_cast<T*>(slot + chunk)[j % kOfChunk] = exists ? h[k * p.h.stride + at(j)] : zero;
      reinterpret_cast<T*>(other + chunk)[j % kOfChunk] =
          exists ? second[k * stride + at(j)] : zero;
    }
  }

  // The gradient's next row; the k-th from the first one on.
  __device__ __forceinline__ void read_grad(Eight<T>& g, int k, int64_t stride, const Extent& e) {
    const int exist = k < e.rows ? e.cols : 0;
    if (vectors) {
      load_8(g, grad, exist, true);
    } else {
      g.clear();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j < exist) reinterpret_cast<T*>(g.words)[j] = grad[at(j)];
      }
    }
    grad += stride;
  }
};

template <class T, tile::Fp8 kFmt, Sink kSink>
__global__ void __launch_bounds__(kQuantizeThreads, sizeof(T) == 2 ? 3 : 1)
    dact_kernel(const __grid_constant__ ActParams p) {
  extern __shared__ __align__(16) char smem[];
  auto& s = *reinterpret_cast<SinkSmem<T, kSink>*>(smem);
  uint4* slot = own_slots(s);
  uint4* const other = slot + kSlotChunks<T> * kChunkStep;
  Tile t;
  tile::let_dependents_start();
  tile::await_predecessors();
  if (!find_rows(t, p.q, p.groups)) return;
  const Place at;
  const Extent e(p.q, t, at);
  const int64_t row = t.r0 + at.r, col = t.c0() + at.c;
  BackwardInputs<T> in(p, row, col);
  in.fill(slot, other, p, e);
  Eight<T> grad[2];
  if (p.act.gated) {
    in.read_grad(grad[0], 0, p.grad.stride, e);
    in.read_grad(grad[1], 1, p.grad.stride, e);
  }
  const OutRows<T> out(p.out, p.q.a.cols, row, col);
  wait_for_slots();
  with_activation<sizeof(T) == 4>(p.act, [&](const auto& act) {
    if (!p.act.gated) {
#pragma unroll 1
      for (int k = 0; k < 8; ++k) {
        float v[8], g[8];
        read_slot<T>(v, slot, k), read_slot<T>(g, other, k);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = mul(g[j], act(v[j]).slope);
        finish_row<T>(slot, k, v, e, out);
      }
      return;
    }
#pragma unroll 1
    for (int k0 = 0; k0 < 8; k0 += 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = k0 + i;
        float v[8], g[8], b[8];
        grad[i].unpack(g);
        in.read_grad(grad[i], k + 2, p.grad.stride, e);
        read_slot<T>(v, slot, k), read_slot<T>(b, other, k);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const ValueSlope f = act(v[j]);
          v[j] = mul(mul(g[j], act.gate(b[j])), f.slope);
          b[j] = act.passed(b[j], mul(g[j], f.value));
        }
        if (p.halves) {
          finish_row<T>(other, k, b, e, out.right_by(p.cols));
        } else {
#pragma unroll
          for (int j = 0; j < 8; ++j) v[j] = in.gates >> j & 1 ? b[j] : v[j];
        }
        finish_row<T>(slot, k, v, e, out);
      }
    }
  });
  // NOTE: what is known of the tile would stay in registers all along, as in quantize_slot.
  place_tile(t, p.q, tile::opaque(t.rt), tile::opaque(t.ct));
  place_rows(t, p.groups);
#pragma unroll 1
  for (int left = p.halves; left >= 0; --left) {
    // Products have many small values beside large ones.
    quantize_slot<T, T, kFmt, kSink, true, false>(s, p.q, slot, t);
    if (left == 0) break;
    __syncthreads();
    slot = other;
    t.ct += p.q.col_tiles / 2, t.last_col = t.ct == p.q.col_tiles - 1;
  }
}

}  // namespace te_mx::sm90
