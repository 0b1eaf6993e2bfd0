// What the steps that end in a quantizer share: a thread's 8 x 8 elements on their way through
// shared memory, the dtype they are rounded to, writing them.
//
// A thread has slots of its own: those of input i start at i * kSlotChunks<In>, row k of an input
// is kVectors chunks of 16 bytes. Its inputs arrive there without passing registers, a loop over
// the rows that is not unrolled computes results and leaves them in the chunks they came from, and
// the quantizer takes them from there. The first slots lie over the quantizer's staging of columns.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <cstddef>

#include "quantize/factor_launch.cuh"

namespace te_mx::sm90 {

template <class In>
inline constexpr int kSlotChunks = 8 * Input<In>::kVectors;
inline constexpr int kChunkStep = kQuantizeThreads;  // between the chunks of a thread

// What a step ends in: MX, packed both ways or in any form, or fp32 factors for 1 x 128.
enum class Sink { packed, plain, factors };

template <class T, Sink kSink>
using SinkSmem = std::conditional_t<kSink == Sink::factors, FactorSmem<T>, QuantizeSmem>;

template <class Smem>
constexpr int slots_offset() {
  static_assert(offsetof(Smem, codes) + sizeof(Smem::codes) == sizeof(Smem));
  return static_cast<int>(offsetof(Smem, codes));
}

// Shared memory of a kernel with the slots of so many inputs.
template <class In, class Smem>
constexpr int fused_smem_bytes(int inputs) {
  return slots_offset<Smem>() + inputs * kSlotChunks<In> * kChunkStep * 16;
}

template <class Smem>
__device__ __forceinline__ uint4* own_slots(Smem& s) {
  return reinterpret_cast<uint4*>(&s.codes[0][0]) + threadIdx.x;
}

// What exists of a thread's 8 rows and columns; less than none at the edges.
struct Extent {
  int rows, cols;
  __device__ __forceinline__ Extent(int rows, int cols) : rows(min(rows, 8)), cols(min(cols, 8)) {}
  __device__ __forceinline__ Extent(const QuantizeParams& p, const Tile& t, const Place& at)
      : Extent(t.rows - at.r, (t.last_col ? p.last_cols : 128) - at.c) {}
  __device__ __forceinline__ bool whole() const { return rows == 8 && cols == 8; }
};

// Starts bringing 8 rows of 8 elements to a slot; what does not exist becomes 0.
template <class In>
__device__ __forceinline__ void fill_slot(uint4* slot, const In* from, int64_t stride,
                                          const Extent& e, bool vectors) {
  constexpr int kVectors = Input<In>::kVectors, kOfChunk = 16 / sizeof(In);
  if (vectors) {
    const int rows = e.cols > 0 ? e.rows : 0;
#pragma unroll
    for (int k = 0; k < 8; ++k, from += stride) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        __pipeline_memcpy_async(slot + (k * kVectors + j) * kChunkStep, from + j * kOfChunk, 16,
                                k < rows ? 0 : 16);
      }
    }
    return;
  }
#pragma unroll 1
  for (int k = 0; k < 8; ++k, from += stride) {
#pragma unroll 1
    for (int j = 0; j < 8; ++j) {
      In* const to = reinterpret_cast<In*>(slot + (k * kVectors + j / kOfChunk) * kChunkStep);
      to[j % kOfChunk] = k < e.rows && j < e.cols ? from[j] : static_cast<In>(0.0f);
    }
  }
}

// Rows of two slots that hold 16 elements in pairs: the first of each pair to one slot, the second
// to the other.
template <class In>
__device__ __forceinline__ void part_pairs(uint4* firsts, uint4* seconds) {
  constexpr int kVectors = Input<In>::kVectors;
#pragma unroll 1
  for (int k = 0; k < 8; ++k) {
    In of[16], first[8], second[8];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int at = (k * kVectors + j) * kChunkStep;
      reinterpret_cast<uint4*>(of)[j] = firsts[at];
      reinterpret_cast<uint4*>(of)[kVectors + j] = seconds[at];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) first[j] = of[2 * j], second[j] = of[2 * j + 1];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int at = (k * kVectors + j) * kChunkStep;
      firsts[at] = reinterpret_cast<const uint4*>(first)[j];
      seconds[at] = reinterpret_cast<const uint4*>(second)[j];
    }
  }
}

__device__ __forceinline__ void wait_for_slots() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

__device__ __forceinline__ uint32_t rounded(__nv_bfloat16, float a, float b) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint32_t rounded(__half, float a, float b) {
  const __half2 v = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint2 rounded(float, float a, float b) {
  return {__float_as_uint(a), __float_as_uint(b)};
}

// Eight elements of type T.
template <class T>
struct Eight {
  union {
    typename Input<T>::Word words[4];
    uint4 chunks[Input<T>::kVectors];
  };
  __device__ __forceinline__ Eight() {}
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < Input<T>::kVectors; ++j) chunks[j] = make_uint4(0, 0, 0, 0);
  }
  // Rounded.
  __device__ __forceinline__ explicit Eight(const float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = rounded(T{}, v[2 * j], v[2 * j + 1]);
  }

  __device__ __forceinline__ void unpack(float (&v)[8]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = Input<T>::values(words[j]);
      v[2 * j] = two.x, v[2 * j + 1] = two.y;
    }
  }
};

// Eight elements of a row from `from` on, of which `cols` exist.
template <class T>
__device__ __forceinline__ void load_8(Eight<T>& v, const T* from, int cols, bool vectors) {
  v.clear();
  if (vectors) {
#pragma unroll
    for (int j = 0; j < Input<T>::kVectors; ++j) {
      if (cols > 0) v.chunks[j] = __ldg(reinterpret_cast<const uint4*>(from) + j);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j < cols) reinterpret_cast<T*>(v.words)[j] = from[j];
  }
}

// Eight weights of a dtype from column `col` on.
__device__ __forceinline__ void load_weights(float (&v)[8], const void* of, DType dtype,
                                             int64_t col, int cols, bool vectors) {
  const auto load = [&]<class T>(const T* from) {
    Eight<T> some;
    load_8(some, from + col, cols, vectors);
    some.unpack(v);
  };
  if (dtype == DType::f32) {
    load(static_cast<const float*>(of));
  } else if (dtype == DType::bf16) {
    load(static_cast<const __nv_bfloat16*>(of));
  } else {
    load(static_cast<const __half*>(of));
  }
}

// Row k of a slot.
template <class In>
__device__ __forceinline__ void read_slot(float (&v)[8], const uint4* slot, int k) {
  Eight<In> row;
#pragma unroll
  for (int j = 0; j < Input<In>::kVectors; ++j)
    row.chunks[j] = slot[(k * Input<In>::kVectors + j) * kChunkStep];
  row.unpack(v);
}

// Where a thread's rows of the result go besides the quantizer.
template <class T>
struct OutRows {
  T* to;  // null: nowhere
  int64_t ld;
  bool vectors;

  __device__ __forceinline__ OutRows(void* out, int64_t ld, int64_t row, int64_t col)
      : to(out == nullptr ? nullptr : static_cast<T*>(out) + row * ld + col), ld(ld) {
    vectors = ld % 8 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  }
  // The same so many columns to the right.
  __device__ __forceinline__ OutRows right_by(int64_t cols) const {
    OutRows other = *this;
    if (to != nullptr) other.to += cols;
    return other;
  }

  __device__ __forceinline__ void write(int k, const Eight<T>& values, const Extent& e) const {
    if (to == nullptr || k >= e.rows || e.cols <= 0) return;
    T* const row = to + k * ld;
    if (vectors) {
#pragma unroll
      for (int j = 0; j < Input<T>::kVectors; ++j) {
        reinterpret_cast<uint4*>(row)[j] = values.chunks[j];
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < e.cols) row[j] = reinterpret_cast<const T*>(values.words)[j];
    }
  }
};

// Rounds row k of the result: to its slot, whose rows have the chunks of In, and out.
template <class In, class T>
__device__ __forceinline__ void finish_row(uint4* slot, int k, float (&v)[8], const Extent& e,
                                           const OutRows<T>& out) {
  if (!e.whole()) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = k < e.rows && j < e.cols ? v[j] : 0.0f;
  }
  const Eight<T> values(v);
#pragma unroll
  for (int j = 0; j < Input<T>::kVectors; ++j) {
    slot[(k * Input<In>::kVectors + j) * kChunkStep] = values.chunks[j];
  }
  out.write(k, values, e);
}

// Quantizes what finish_row left in a slot; kSums and kOnce as in quantize_patch. NOTE: codes
// of columns are staged over the slot, after a barrier inside.
template <class In, class T, tile::Fp8 kFmt, Sink kSink, bool kSums = true, bool kOnce = true>
__device__ __forceinline__ void quantize_slot(SinkSmem<T, kSink>& s, const FactorParams& p,
                                              const uint4* slot, const Tile& t) {
  // NOTE: places in shared memory that are known before would stay in registers all along.
  const Place at(tile::opaque(threadIdx.x));
  typename Input<T>::Word x[8][4];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
#pragma unroll
    for (int j = 0; j < Input<T>::kVectors; ++j) {
      reinterpret_cast<uint4*>(x[k])[j] = slot[(k * Input<In>::kVectors + j) * kChunkStep];
    }
  }
  if constexpr (kSink != Sink::factors) {
    quantize_patch<T, kFmt, kSink == Sink::plain, kSums, kOnce>(p, s, x, t, at);
  } else if (p.aligned) {
    quantize_factor_patch<T, kFmt, FactorBlocks::rows_aligned, kSums>(p, s, x, t, at);
  } else {
    quantize_factor_patch<T, kFmt, FactorBlocks::rows, kSums>(p, s, x, t, at);
  }
}

// Parameters of the quantizer that a step ends in, for rows that are cut into `row_tiles` tiles,
// with `k` codes in a row of the columns.
inline Status sink_params(const QuantizeTask& a, const QuantizeOut& to, int64_t row_tiles,
                          int64_t k, FactorParams& p) {
  if (!is_blockwise(to.scaling)) return quantize_params(a, row_tiles, k, p);
  if (to.scaling.block_rows != 1) return Status::unsupported;
  const Status status = check_factors(to);
  return status == Status::ok ? factor_params(a, to, row_tiles, k, p) : status;
}
inline Status sink_params(const QuantizeTask& a, const QuantizeOut& to, FactorParams& p) {
  return sink_params(a, to, (a.rows + 127) / 128, a.rows, p);
}

}  // namespace te_mx::sm90
