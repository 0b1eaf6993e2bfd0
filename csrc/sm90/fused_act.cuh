// Activations and their derivatives, quantized as they are computed: tiles of 128 x 128 of the
// result, as in the quantizer.
#pragma once

#include "activation.cuh"
#include "fused_patch.cuh"
#include "te_mx/sm90_fused.h"

namespace te_mx::sm90 {

struct ActParams {
  QuantizeParams q;
  Matrix h, grad;
  int64_t cols;  // of the activated values; gates start there in h
  ActWords act;
  void* out;
  bool vectors;  // inputs have 16-byte vectors of 8 elements only, aligned
  bool halves;   // of a gated derivative: a tile and its twin in the other half at once
};

// ----------------------------------------------------------------------------------------- forward
template <class T, tile::Fp8 kFmt, bool kPlain>
__global__ void __launch_bounds__(kQuantizeThreads, sizeof(T) == 2 ? 4 : 2)
    act_kernel(const __grid_constant__ ActParams p) {
  extern __shared__ __align__(16) char smem[];
  QuantizeSmem& s = *reinterpret_cast<QuantizeSmem*>(smem);
  uint4* const slot = own_slots(smem);
  uint4* const gate_slot = slot + kSlotChunks<T> * kChunkStep;
  Tile t;
  if (!find_tile(t, p.q)) return;
  const Place at;
  const Extent e(p.q, t, at);
  const T* const from =
      static_cast<const T*>(p.h.data) + (t.r0() + at.r) * p.h.stride + t.c0() + at.c;
  fill_slot<T>(slot, from, p.h.stride, e, p.vectors);
  if (p.act.gated) fill_slot<T>(gate_slot, from + p.cols, p.h.stride, e, p.vectors);
  const OutRows<T> out(p.out, p.cols, t.r0() + at.r, t.c0() + at.c);
  wait_for_slots();
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
  quantize_slot<T, T, kFmt, kPlain>(s, p.q, slot, t, at);
}

// ---------------------------------------------------------------------------------------- backward
// What a thread reads for its columns of the gradient of h. Without `halves` a column at or behind
// `cols` is one of the gates' gradient, of the same inputs.
template <class T>
__device__ __forceinline__ void fill_backward(uint4* slot, const ActParams& p, int64_t row,
                                              int64_t col, const Extent& e) {
  constexpr int kInput = kSlotChunks<T> * kChunkStep;
  const T* const h = static_cast<const T*>(p.h.data) + row * p.h.stride;
  const T* const grad = static_cast<const T*>(p.grad.data) + row * p.grad.stride;
  if (p.vectors) {
    const int64_t first = p.act.gated && col >= p.cols ? col - p.cols : col;
    fill_slot<T>(slot, h + first, p.h.stride, e, true);
    fill_slot<T>(slot + kInput, grad + first, p.grad.stride, e, true);
    if (p.act.gated) fill_slot<T>(slot + 2 * kInput, h + p.cols + first, p.h.stride, e, true);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 64; ++i) {
    const int k = i / 8, j = i % 8;
    const bool exists = k < e.rows && j < e.cols;
    const int64_t c = p.act.gated && col + j >= p.cols ? col + j - p.cols : col + j;
    constexpr int kOfChunk = 16 / sizeof(T);
    uint4* const chunk = slot + (k * Input<T>::kVectors + j / kOfChunk) * kChunkStep;
    const auto put = [&](uint4* to, const T* row, int64_t stride) {
      reinterpret_cast<T*>(to)[j % kOfChunk] = exists ? row[k * stride + c] : static_cast<T>(0.0f);
    };
    put(chunk, h, p.h.stride);
    put(chunk + kInput, grad, p.grad.stride);
    if (p.act.gated) put(chunk + 2 * kInput, h + p.cols, p.h.stride);
  }
}

template <class T, tile::Fp8 kFmt, bool kPlain>
__global__ void __launch_bounds__(kQuantizeThreads, sizeof(T) == 2 ? 3 : 1)
    dact_kernel(const __grid_constant__ ActParams p) {
  extern __shared__ __align__(16) char smem[];
  QuantizeSmem& s = *reinterpret_cast<QuantizeSmem*>(smem);
  uint4* slot = own_slots(smem);
  uint4* const grad_slot = slot + kSlotChunks<T> * kChunkStep;
  uint4* const gate_slot = grad_slot + kSlotChunks<T> * kChunkStep;
  Tile t;
  if (!find_tile(t, p.q)) return;
  if (p.q.a.col_sum != nullptr) cudaTriggerProgrammaticLaunchCompletion();
  const Place at;
  const Extent e(p.q, t, at);
  const int64_t row = t.r0() + at.r, col = t.c0() + at.c;
  fill_backward<T>(slot, p, row, col, e);
  const int64_t width = p.q.a.cols;
  const OutRows<T> out(p.out, width, row, col), out_gate(p.out, width, row, col + p.cols);
  uint32_t gates = 0;  // bit j: column j is one of the gates' gradient
  if (p.act.gated && !p.halves) {
#pragma unroll
    for (int j = 0; j < 8; ++j) gates |= static_cast<uint32_t>(col + j >= p.cols) << j;
  }
  wait_for_slots();
  with_activation<sizeof(T) == 4>(p.act, [&](const auto& act) {
#pragma unroll 1
    for (int k = 0; k < 8; ++k) {
      float v[8], g[8];
      read_slot<T>(v, slot, k);
      read_slot<T>(g, grad_slot, k);
      if (!p.act.gated) {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = mul(g[j], act(v[j]).slope);
      } else {
        float b[8];
        read_slot<T>(b, gate_slot, k);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const ValueSlope f = act(v[j]);
          v[j] = mul(mul(g[j], act.gate(b[j])), f.slope);
          b[j] = act.passed(b[j], mul(g[j], f.value));
        }
        if (p.halves) {
          finish_row<T>(gate_slot, k, b, e, out_gate);
        } else {
#pragma unroll
          for (int j = 0; j < 8; ++j) v[j] = gates >> j & 1 ? b[j] : v[j];
        }
      }
      finish_row<T>(slot, k, v, e, out);
    }
  });
#pragma unroll 1
  for (int left = p.halves; left >= 0; --left) {
    quantize_slot<T, T, kFmt, kPlain>(s, p.q, slot, t, at);
    if (left == 0) break;
    __syncthreads();
    slot = gate_slot;
    t.ct += p.q.col_tiles / 2, t.last_col = t.ct == p.q.col_tiles - 1;
  }
}

}  // namespace te_mx::sm90
