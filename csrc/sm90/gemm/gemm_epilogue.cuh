// The epilogue of one wave: bias, aux, GELU or its derivative, bias gradient, accumulation,
// rounding, and stores. The tensor cores wait for most of what it takes, so what can wait itself,
// for global memory, is started long before: the bias at the start of a block, gelu_in by the
// epilogue warp (gemm_epilogue_warp.cuh).
#pragma once

#include <type_traits>

#include "gemm/gemm_gelu_table.cuh"
#include "gemm/gemm_staging.cuh"
#include "mxtile/sm90/wgmma.cuh"

namespace te_mx::sm90 {

// plain: bias and accumulation only; full: aux, GELU or GELU' of gelu_in, and bias gradient too;
// backward: GELU' of a gelu_in that the epilogue warp brings, and bias gradient, only; sums: none,
// they go to the CTAs of a cluster (gemm_exchange.cuh); add: fp32 sums that the copy engine adds to
// D, and nothing else.
enum class EpilogueKind : int { plain = 0, full = 1, backward = 2, sums = 3, add = 4 };

inline constexpr int kBiasBytes = 1024;  // of one block: as it came, and as fp32

// Starts the way of a block's bias, one of [groups, N], to shared memory, as it is.
__device__ __forceinline__ void load_bias(const EpilogueParams& p, const Wave& w, int group) {
  const int size = p.bias_dtype == DType::f32 ? 4 : 2;
  const char* const from =
      static_cast<const char*>(p.bias) + (static_cast<int64_t>(group) * p.n + w.n0) * size;
  if (p.bias_words) {
    if (4 * w.thread >= 128 * size) return;
    const int left = (p.n - w.n0) * size - 4 * w.thread;
    tile::copy_word_async(w.bias + 4 * w.thread, left > 0 ? from + 4 * w.thread : from,
                          max(0, min(left, 4)));
  } else if (w.n0 + w.thread < p.n) {
    reinterpret_cast<uint16_t*>(w.bias)[w.thread] =
        reinterpret_cast<const uint16_t*>(from)[w.thread];
  }
}

// Makes fp32 of what load_bias() brought, each thread of what it brought itself.
__device__ __forceinline__ void convert_bias(const EpilogueParams& p, const Wave& w) {
  float* const to = reinterpret_cast<float*>(w.bias + kBiasBytes / 2);
  if (p.bias == nullptr) {
    to[w.thread] = -0.0f;  // what leaves every number as it is, -0 too
    return;
  }
  tile::copy_words_wait();
  with_type(p.bias_dtype, [&]<class T>(T) {
    if (sizeof(T) == 4 || !p.bias_words) {
      to[w.thread] = to_float(reinterpret_cast<const T*>(w.bias)[w.thread]);
    } else if (w.thread < 64) {
      using Pair = typename PairOf<T>::type;
      reinterpret_cast<float2*>(to)[w.thread] =
          to_float2(reinterpret_cast<const Pair*>(w.bias)[w.thread]);
    }
  });
}

__device__ __forceinline__ void add_bias(float (&v)[64], const Wave& w) {
  const float* const bias =
      reinterpret_cast<const float*>(w.bias + kBiasBytes / 2) + 2 * (w.thread % 4);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 b = *reinterpret_cast<const float2*>(bias + 8 * j);
    v[4 * j] += b.x, v[4 * j + 1] += b.y, v[4 * j + 2] += b.x, v[4 * j + 3] += b.y;
  }
}

// Of columns from kFirst / 2 on.
template <Gelu kKind, int kFirst, int kCount>
__device__ __forceinline__ void apply_gelu(float (&v)[64]) {
  if constexpr (kKind != Gelu::none) {
#pragma unroll
    for (int i = kFirst; i < kFirst + kCount; i += 2) {
      const float2 y = gelu_forward<kKind>(make_float2(v[i], v[i + 1]));
      v[i] = y.x, v[i + 1] = y.y;
    }
  }
}

template <Gelu kKind, class Pair>
__device__ __forceinline__ void apply_derivative(float& a, float& b, Pair x) {
  const float2 d = gelu_backward<kKind>(make_float2(a, b), to_float2(derivative_input(x)));
  a = d.x, b = d.y;
}

// How many of four pairs take the table. It costs time of the SM's shared memory, where the formula
// costs issue slots, so some of both is the fastest.
template <Gelu kKind, class T>
inline constexpr int kByTable = !std::is_same_v<T, __nv_bfloat16> ? 0
                                : kKind == Gelu::tanh             ? 2
                                                                  : 3;

// v[] *= GELU'(gelu_in), half of the columns, with gelu_in in the staging,
template <Gelu kKind, class T, int kPanel>
__device__ __forceinline__ void apply_derivatives(float (&v)[64], const Wave& w) {
#pragma unroll
  for (int part = 4 * kPanel; part < 4 * kPanel + 4; ++part) {
    uint32_t x[4];
    read_ahead(x, part, w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float &a = v[8 * part + 2 * i], &b = v[8 * part + 2 * i + 1];
      if (i < kByTable<kKind, T>) {
        const float2 d = gelu_backward_by_table(make_float2(a, b), x[i], w.constants);
        a = d.x, b = d.y;
      } else {
        apply_derivative<kKind>(a, b, *reinterpret_cast<const typename PairOf<T>::type*>(&x[i]));
      }
    }
  }
}

// or read from global memory, element by element.
__device__ __forceinline__ void apply_derivatives(float (&v)[64], const EpilogueParams& p,
                                                  const Wave& w) {
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int h = part % 2, first = part / 2 * 8;
    float2 x[8];
    tile::compiler_fence();
    read_row(x, p.gelu_in, p.gelu_in_dtype, p, w, p.n, h, first);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int i = 4 * (first + j) + 2 * h;
      if (p.gelu == Gelu::tanh) {
        apply_derivative<Gelu::tanh>(v[i], v[i + 1], x[j]);
      } else {
        apply_derivative<Gelu::erf>(v[i], v[i + 1], x[j]);
      }
    }
  }
}

// One step of a sum over lanes that differ in bit `mask`: each keeps half of the numbers.
template <int kCount>
__device__ __forceinline__ void fold(float (&s)[32], const int mask, const int lane) {
  const bool upper = (lane & mask) != 0;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float mine = upper ? s[kCount / 2 + i] : s[i], other = upper ? s[i] : s[kCount / 2 + i];
    s[i] = mine + __shfl_xor_sync(~0u, other, mask);
  }
}

// Column sums of the wave: 16 rows inside each warp, then the four warps, always in the same order.
// Needs this warp's rows of slot 0. Rows outside D become 0.
__device__ __forceinline__ void sum_columns(float (&v)[64], const EpilogueParams& p,
                                            const Wave& w) {
  const int lane = w.thread % 32, warp = w.thread / 32;
  if (w.m0 + 64 > w.m_end) {
    const int row = w.m0 + w.thread / 32 * 16 + w.thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (row + i % 4 / 2 * 8 >= w.m_end) v[i] = 0.0f;
    }
  }
  float s[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = v[4 * (i / 2) + i % 2] + v[4 * (i / 2) + i % 2 + 2];
  fold<32>(s, 16, lane), fold<16>(s, 8, lane), fold<8>(s, 4, lane);
  // Left are columns 16 (lane / 4) + 2 (lane % 4), the next one, and those 8 further on.
  const auto partial = [&](int of) {
    return tile::smem_addr(w.staging) + of * (kPanelBytes / 4);  // the rows of that warp
  };
  const uint32_t to = partial(warp) + 64 * (lane / 4) + 8 * (lane % 4);
  tile::st_shared_f32x2(to, s[0], s[1]);
  tile::st_shared_f32x2(to + 32, s[2], s[3]);
  tile::named_barrier(w.barrier, 128);
  const auto read = [&](int of) {
    return __uint_as_float(tile::ld_shared_u32(partial(of) + 4 * w.thread));
  };
  const float sum = (read(0) + read(1)) + (read(2) + read(3));
  const int col = w.n0 + w.thread;
  if (col < p.n && w.m0 < w.m_end) p.bias_grad[static_cast<int64_t>(w.m0 / 64) * p.n + col] = sum;
  tile::named_barrier(w.barrier, 128);
}

// Column sums of the wave as it lies in the staging, 16-bit and behind a fence_async_proxy(), by
// the tensor cores: its transpose times ones. Eight results of theirs are the same.
template <class T>
__device__ __forceinline__ void sum_staged_columns(const EpilogueParams& p, const Wave& w) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  const int lane = w.thread % 32, warp = w.thread / 32;
  float left[4], right[4];
  tile::named_barrier(w.barrier, 128);
  const uint32_t from = __shfl_sync(~0u, tile::wgmma_desc(w.staging), 0);
  const uint64_t ones = tile::wgmma_plain_desc(w.constants);
  tile::wgmma_pin(left), tile::wgmma_pin(right);
  tile::wgmma_fence();
#pragma unroll
  for (int rows = 0; rows < 4; ++rows) {
    tile::wgmma_64x8x16<kHalf>(left, from + 128 * rows, ones, rows != 0);
    tile::wgmma_64x8x16<kHalf>(right, from + 128 * rows + kPanelBytes / 16, ones, rows != 0);
  }
  tile::wgmma_commit();
  tile::wgmma_wait<0>();
  tile::wgmma_pin(left), tile::wgmma_pin(right);
  // The four lanes of a row write a column each.
  const float two[2] = {lane % 2 ? left[2] : left[0], lane % 2 ? right[2] : right[0]};
  const int col = w.n0 + lane % 4 / 2 * 64 + warp * 16 + lane % 2 * 8 + lane / 4;
  if (col < p.n && w.m0 < w.m_end)
    p.bias_grad[static_cast<int64_t>(w.m0 / 64) * p.n + col] = lane % 4 / 2 ? two[1] : two[0];
}

// Bias gradient, and stores unless they take more than the copy engine.
template <EpilogueKind kEpilogue, int kSlots>
__device__ __forceinline__ void finish(float (&v)[64], const EpilogueParams& p,
                                       const CUtensorMap* map, const Wave& w) {
  if constexpr (kEpilogue != EpilogueKind::plain) {
    if (p.bias_grad != nullptr) sum_columns(v, p, w);
  }
  if (w.by_element) return;
  with_type(p.out_dtype, [&]<class T>(T) { store_wave<T, kSlots>(v, p, map, p.accumulate, w); });
}

template <int kSlots>
__device__ __forceinline__ void finish_by_element(float (&v)[64], const EpilogueParams& p,
                                                  const CUtensorMap* map, const Wave& w) {
  if (p.accumulate) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float2 old[16];
      read_row(old, p.out, p.out_dtype, p, w, p.ldo, h, 0);
#pragma unroll
      for (int j = 0; j < 16; ++j) v[4 * j + 2 * h] += old[j].x, v[4 * j + 2 * h + 1] += old[j].y;
    }
  }
  with_type(p.out_dtype, [&]<class T>(T) {
    if (w.direct) {
      write_rows<T>(v, p.out, p, w, p.ldo);
      // What comes next to the bias and the staging waits for all who used them here.
      tile::fence_async_proxy();
      tile::named_barrier(w.barrier, 128);
    } else {
      store_wave<T, kSlots>(v, p, map, false, w);
    }
  });
}

// NOTE: every case has a finish() of its own. Where cases meet the compiler would move all 64
// numbers to other registers.
template <int kSlots>
__device__ __forceinline__ void epilogue_full(float (&v)[64], const EpilogueParams& p,
                                              const CUtensorMap* map, const Wave& w) {
  if (p.gelu_in != nullptr) {
    apply_derivatives(v, p, w), finish<EpilogueKind::full, kSlots>(v, p, map, w);
    return;
  }
  const bool by_warp = p.side == SideTensor::aux;
  if (by_warp) {
    // NOTE: a wait for parity 1 is over before the first block.
    tile::mbar_wait(w.arrived, 1);
    with_16_bit_type(p.out_dtype, [&]<class T>(T) {
      stage_panel<T>(v, 0, 0, w);
      stage_panel<T>(v, 1, 1, w);
    });
    tile::fence_async_proxy();
    leave_staging(w);
  } else if (p.aux != nullptr) {
    with_type(p.aux_dtype, [&]<class T>(T) { write_rows<T>(v, p.aux, p, w, p.n); });
  }
  const auto rest = [&]<Gelu kKind>() {
    apply_gelu<kKind, 0, 32>(v);
    if (!by_warp) {
      apply_gelu<kKind, 32, 32>(v);
      finish<EpilogueKind::full, kSlots>(v, p, map, w);
      return;
    }
    tile::mbar_wait(w.arrived, 0);
    with_16_bit_type(p.out_dtype, [&]<class T>(T) {
      stage_panel<T>(v, 0, 0, w);
      apply_gelu<kKind, 32, 32>(v);
      stage_panel<T>(v, 1, 1, w);
    });
    tile::fence_async_proxy();
    leave_staging(w);
  };
  if (p.gelu == Gelu::tanh) {
    rest.template operator()<Gelu::tanh>();
  } else if (p.gelu == Gelu::erf) {
    rest.template operator()<Gelu::erf>();
  } else {
    rest.template operator()<Gelu::none>();
  }
}

// NOTE: rows past the end of D count in the bias gradient: their codes and their gelu_in arrive as
// 0, and the factors of rows that are not there are numbers, so they are 0 here.
__device__ __forceinline__ void epilogue_backward(float (&v)[64], const EpilogueParams& p,
                                                  const Wave& w) {
  tile::mbar_wait(w.arrived, w.phase);
  // NOTE: a warp reads and writes its own rows of the staging only, so D may follow gelu_in there.
  const auto go = [&]<Gelu kKind, class T>() {
    apply_derivatives<kKind, T, 0>(v, w);
    stage_panel<T>(v, 0, 0, w);
    apply_derivatives<kKind, T, 1>(v, w);
    stage_panel<T>(v, 1, 1, w);
    tile::fence_async_proxy();
    if (p.bias_grad != nullptr) sum_staged_columns<T>(p, w);
    leave_staging(w);
  };
  with_16_bit_type(p.out_dtype, [&]<class T>(T) {
    p.gelu == Gelu::tanh ? go.template operator()<Gelu::tanh, T>()
                         : go.template operator()<Gelu::erf, T>();
  });
}

template <EpilogueKind kEpilogue, int kSlots, bool kByWarps>
__device__ __forceinline__ void store_block(float (&v)[64], const EpilogueParams& p,
                                            const CUtensorMap* map, const Wave& at) {
  Wave w = at;
  // NOTE: or the compiler would keep addresses of the epilogue in registers during the main loop,
  // and place the sums so that promotion reads three numbers from one register bank.
  if constexpr (kEpilogue != EpilogueKind::plain) w.thread = tile::keep(threadIdx.x) % 128;
  if constexpr (kEpilogue == EpilogueKind::backward) {
    epilogue_backward(v, p, w);
  } else if (kByWarps && kEpilogue == EpilogueKind::plain && !p.accumulate && !w.by_element) {
    if (p.bias != nullptr) {
      convert_bias(p, w);
      tile::named_barrier(w.barrier, 128);
      add_bias(v, w);
      tile::named_barrier(w.barrier, 128);  // the next block's bias comes to the same place
    }
    with_type(p.out_dtype, [&]<class T>(T) { store_by_warps<T, kSlots>(v, p, w); });
  } else {
    convert_bias(p, w);
    free_staging<kSlots>(w);
    add_bias(v, w);
    if constexpr (kEpilogue == EpilogueKind::full) {
      epilogue_full<kSlots>(v, p, map, w);
    } else {
      finish<kEpilogue, kSlots>(v, p, map, w);
    }
    if (w.by_element) finish_by_element<kSlots>(v, p, map, w);
  }
}

template <EpilogueKind kEpilogue, int kSlots, bool kByWarps = false>
__device__ __forceinline__ void epilogue_wave(float (&v)[64], const EpilogueParams& p,
                                              const CUtensorMap* map, const Wave& at) {
  if constexpr (kEpilogue == EpilogueKind::add) {
    free_staging<kSlots>(at);
    store_wave<float, kSlots, true>(v, p, map, true, at);
  } else {
    store_block<kEpilogue, kSlots, kByWarps>(v, p, map, at);
  }
}

}  // namespace te_mx::sm90
