// CUDA C++ for a compiler of C++: included before every kernel source (-include), which
// translate.py made out of what is neither (`__shared__` variables, `<<<>>>`).
#pragma once

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <tuple>
#include <type_traits>
#include <utility>

#include "simt/async.hpp"
#include "simt/machine.hpp"

#undef __device__
#undef __global__
#undef __host__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

namespace simt {

// A `__shared__` variable: one for every CTA. `tag` is a lambda of the place where it stands.
template <class T, class Tag>
T& shared_variable(Tag) {
  static const char key = 0;
  return *static_cast<T*>(static_shared(&key, sizeof(T), alignof(T) < 16 ? 16 : alignof(T)));
}
template <class T>
T* shared_bytes(size_t aligned) {
  return static_cast<T*>(dynamic_shared(aligned));
}

template <class... Params, class... Given>
Launch launch_of(dim3 grid, dim3 block, size_t bytes, void (*kernel)(Params...), Given&&... given) {
  Launch launch;
  launch.grid = grid, launch.block = block, launch.dynamic_bytes = static_cast<uint32_t>(bytes);
  std::tuple<std::decay_t<Params>...> params(std::forward<Given>(given)...);
  launch.kernel = [kernel, params] { std::apply(kernel, params); };
  return launch;
}

// kernel<<<grid, block, bytes, stream>>>(given...), as translate.py writes it.
template <class... Params>
struct Configured {
  void (*kernel)(Params...);
  dim3 grid, block;
  size_t bytes;
  template <class... Given>
  void operator()(Given&&... given) const {
    run(launch_of(grid, block, bytes, kernel, std::forward<Given>(given)...));
  }
};
template <class... Params>
Configured<Params...> configured(void (*kernel)(Params...), dim3 grid, dim3 block, size_t bytes = 0,
                                 cudaStream_t = nullptr) {
  return {kernel, grid, block, bytes};
}

uint32_t cluster_size(const cudaLaunchConfig_t& config);
// Fails for more dynamic shared memory than a kernel may have.
void check_shared(const void* kernel, size_t bytes);

}  // namespace simt

template <class... Params, class... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Given&&... given) {
  simt::Launch launch = simt::launch_of(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                                        kernel, std::forward<Given>(given)...);
  launch.cluster = simt::cluster_size(*config);
  simt::check_shared(reinterpret_cast<const void*>(kernel), config->dynamicSmemBytes);
  simt::run(launch);
  return cudaSuccess;
}
template <class T>
  requires std::is_function_v<T>
cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

// --------------------------------------------------------------------------------------- barriers
inline void __syncthreads() { simt::named_barrier(0, 0, true); }
inline int __syncthreads_count(int p) { return simt::named_barrier(0, 0, true, p != 0); }
inline int __syncthreads_or(int p) { return simt::named_barrier(0, 0, true, p != 0) != 0; }
inline int __syncthreads_and(int p) { return simt::named_barrier(0, 0, true, p == 0) == 0; }
inline void __syncwarp(uint32_t mask = ~0u) {
  simt::leave(simt::gather(mask, "__syncwarp", "", 0));
}
inline void __threadfence() { simt::yield(); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { simt::yield(true); }
[[noreturn]] inline void __trap() { simt::fail("trap"); }

// ------------------------------------------------------------------------------------------ lanes
namespace simt {

template <class T, class From>
T shuffle(uint32_t mask, const char* what, const T& v, int width, const From& from) {
  const int lane = self().lane, first = lane & ~(width - 1);
  const int there = from(lane - first);
  const int source = there < 0 || there >= width ? lane : first + there;
  if ((mask >> source & 1) == 0) fail(std::string(what) + " from a lane that its mask leaves out");
  return together(mask, what, v, [&](const auto& of) { return of[source]; });
}

template <class T, class Make>
T reduced(uint32_t mask, const char* what, T v, const Make& make) {
  return together(mask, what, v, [&](const auto& of) {
    const int first = std::countr_zero(mask);
    T all = of[first];
    for (int i = first + 1; i < 32; ++i) {
      if (mask >> i & 1) all = make(all, of[i]);
    }
    return all;
  });
}

}  // namespace simt

template <class T>
T __shfl_sync(uint32_t mask, T v, int from, int width = 32) {
  return simt::shuffle(mask, "__shfl_sync", v, width, [&](int) { return from & (width - 1); });
}
template <class T>
T __shfl_up_sync(uint32_t mask, T v, unsigned by, int width = 32) {
  return simt::shuffle(mask, "__shfl_up_sync", v, width,
                       [&](int lane) { return lane - static_cast<int>(by); });
}
template <class T>
T __shfl_down_sync(uint32_t mask, T v, unsigned by, int width = 32) {
  return simt::shuffle(mask, "__shfl_down_sync", v, width,
                       [&](int lane) { return lane + static_cast<int>(by); });
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T v, int with, int width = 32) {
  return simt::shuffle(mask, "__shfl_xor_sync", v, width, [&](int lane) { return lane ^ with; });
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  return simt::together(mask, "__ballot_sync", predicate != 0, [&](const auto& of) {
    uint32_t all = 0;
    for (int i = 0; i < 32; ++i) all |= (mask >> i & 1) && of[i] ? 1u << i : 0;
    // NOTE: lanes that have left count as false.
    return all & simt::self().warp->there;
  });
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) {
  return __ballot_sync(mask, predicate) == (mask & simt::self().warp->there);
}
template <class T>
uint32_t __match_any_sync(uint32_t mask, T v) {
  return simt::together(mask, "__match_any_sync", v, [&](const auto& of) {
    uint32_t all = 0;
    for (int i = 0; i < 32; ++i) all |= (mask >> i & 1) && of[i] == v ? 1u << i : 0;
    return all;
  });
}
template <class T>
T __reduce_max_sync(uint32_t mask, T v) {
  return simt::reduced(mask, "__reduce_max_sync", v, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
T __reduce_min_sync(uint32_t mask, T v) {
  return simt::reduced(mask, "__reduce_min_sync", v, [](T a, T b) { return b < a ? b : a; });
}
template <class T>
T __reduce_add_sync(uint32_t mask, T v) {
  return simt::reduced(mask, "__reduce_add_sync", v, [](T a, T b) { return a + b; });
}
inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t v) {
  return simt::reduced(mask, "__reduce_or_sync", v, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_and_sync(uint32_t mask, uint32_t v) {
  return simt::reduced(mask, "__reduce_and_sync", v, [](uint32_t a, uint32_t b) { return a & b; });
}
inline uint32_t __reduce_xor_sync(uint32_t mask, uint32_t v) {
  return simt::reduced(mask, "__reduce_xor_sync", v, [](uint32_t a, uint32_t b) { return a ^ b; });
}
inline uint32_t __activemask() { return simt::self().warp->there; }

// ----------------------------------------------------------------------------------------- memory
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *const_cast<const volatile T*>(p);
}
// What is read and written past L1 may have been written meanwhile.
#define SIMT_VECTOR(T)             \
  template <>                      \
  inline T __ldcg<T>(const T* p) { \
    return *p;                     \
  }
SIMT_VECTOR(uint2)
SIMT_VECTOR(uint4)
SIMT_VECTOR(float2)
SIMT_VECTOR(float4)
SIMT_VECTOR(int2)
SIMT_VECTOR(int4)
#undef SIMT_VECTOR
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcv(const T* p) {
  return __ldcg(p);
}
template <class T, class V>
void __stcg(T* p, V v) {
  *p = v;
}
template <class T, class V>
void __stcs(T* p, V v) {
  *p = v;
}

template <class T, class Make>
T simt_atomic(T* p, const Make& make) {
  if (simt::random_word() % 4 == 0) simt::yield();
  const T before = *p;
  *p = make(before);
  return before;
}
template <class T, class V>
T atomicAdd(T* p, V v) {
  return simt_atomic(p, [&](T b) { return static_cast<T>(b + v); });
}
template <class T, class V>
T atomicOr(T* p, V v) {
  return simt_atomic(p, [&](T b) { return static_cast<T>(b | v); });
}
template <class T, class V>
T atomicAnd(T* p, V v) {
  return simt_atomic(p, [&](T b) { return static_cast<T>(b & v); });
}
template <class T, class V>
T atomicMax(T* p, V v) {
  return simt_atomic(p, [&](T b) { return b < static_cast<T>(v) ? static_cast<T>(v) : b; });
}
template <class T, class V>
T atomicMin(T* p, V v) {
  return simt_atomic(p, [&](T b) { return static_cast<T>(v) < b ? static_cast<T>(v) : b; });
}
template <class T, class V>
T atomicExch(T* p, V v) {
  return simt_atomic(p, [&](T) { return static_cast<T>(v); });
}
template <class T, class V>
T atomicCAS(T* p, V expected, V v) {
  return simt_atomic(p, [&](T b) { return b == static_cast<T>(expected) ? static_cast<T>(v) : b; });
}

inline void __pipeline_memcpy_async(void* to, const void* from, size_t size, size_t zeros = 0) {
  simt::copy_async(to, from, static_cast<uint32_t>(size), static_cast<uint32_t>(size - zeros));
}
inline void __pipeline_commit() { simt::copy_async_commit(); }
inline void __pipeline_wait_prior(size_t pending) { simt::copy_async_wait(pending); }

// ---------------------------------------------------------------------------------------- numbers
template <class A, class B>
  requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(std::fmin(static_cast<T>(a), static_cast<T>(b)));
  } else {
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
  }
}
template <class A, class B>
  requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(std::fmax(static_cast<T>(a), static_cast<T>(b)));
  } else {
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
  }
}

using std::isinf;
using std::isnan;

inline float __uint_as_float(uint32_t v) { return std::bit_cast<float>(v); }
inline uint32_t __float_as_uint(float v) { return std::bit_cast<uint32_t>(v); }
inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline int __float_as_int(float v) { return std::bit_cast<int>(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
// The sum, and what rounding left of it: Knuth's two sums.
inline float __fadd_rz(float a, float b) {
  const float s = a + b, rest = (a - (s - (s - a))) + (b - (s - a));
  return rest != 0 && (rest < 0) == (s > 0) ? std::nextafter(s, 0.0f) : s;
}
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
// Products of two fp32 numbers are exact in fp64.
inline float __fmul_rz(float a, float b) {
  const double exact = static_cast<double>(a) * b;
  const float v = static_cast<float>(exact);
  return std::fabs(v) > std::fabs(exact) ? std::nextafter(v, 0.0f) : v;
}
inline float __fmul_ru(float a, float b) {
  const double exact = static_cast<double>(a) * b;
  const float v = static_cast<float>(exact);
  return v < exact ? std::nextafter(v, HUGE_VALF) : v;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
inline uint32_t __float2uint_rz(float v) {
  return v != v || v <= 0 ? 0 : v >= 4294967296.0f ? ~0u : static_cast<uint32_t>(v);
}
inline int __float2int_rn(float v) { return static_cast<int>(std::nearbyint(v)); }
inline int __float2int_rz(float v) { return static_cast<int>(v); }
inline float __uint2float_rn(uint32_t v) { return static_cast<float>(v); }
inline float __int2float_rn(int v) { return static_cast<float>(v); }

inline int __popc(uint32_t v) { return std::popcount(v); }
inline int __popcll(uint64_t v) { return std::popcount(v); }
inline int __clz(int v) { return std::countl_zero(static_cast<uint32_t>(v)); }
inline int __ffs(int v) { return v == 0 ? 0 : std::countr_zero(static_cast<uint32_t>(v)) + 1; }
inline uint32_t __brev(uint32_t v) {
  uint32_t r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1) << (31 - i);
  return r;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
inline uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, uint32_t by) {
  return static_cast<uint32_t>(((uint64_t{hi} << 32) | lo) >> (by & 31));
}
inline uint32_t __funnelshift_l(uint32_t lo, uint32_t hi, uint32_t by) {
  return static_cast<uint32_t>(((uint64_t{hi} << 32) | lo) << (by & 31) >> 32);
}
namespace simt {
// prmt: a selector's bit 3 spreads the sign of the byte.
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selectors, bool signs) {
  const uint64_t from = uint64_t{b} << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t s = selectors >> (4 * i) & 15;
    uint32_t byte = static_cast<uint32_t>(from >> (8 * (s & 7)) & 0xFF);
    if (signs && s >= 8) byte = byte & 0x80 ? 0xFF : 0;
    r |= byte << (8 * i);
  }
  return r;
}
// Lanes of kBits bits of a word.
template <int kBits, class Make>
uint32_t by_parts(uint32_t a, uint32_t b, const Make& make) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  uint32_t r = 0;
  for (int i = 0; i < 32; i += kBits)
    r |= (static_cast<uint32_t>(make(a >> i & kMask, b >> i & kMask)) & kMask) << i;
  return r;
}
}  // namespace simt
// NOTE: __byte_perm ignores bit 3 of a selector; only prmt spreads signs.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selectors) {
  return simt::permuted(a, b, selectors, false);
}
#define SIMT_PARTS(NAME, BITS, VALUE)                                                            \
  inline uint32_t NAME(uint32_t a, uint32_t b) {                                                 \
    return simt::by_parts<BITS>(a, b, [](uint32_t x, uint32_t y) -> uint32_t { return VALUE; }); \
  }
SIMT_PARTS(__vadd2, 16, x + y)
SIMT_PARTS(__vadd4, 8, x + y)
SIMT_PARTS(__vsub2, 16, x - y)
SIMT_PARTS(__vsub4, 8, x - y)
SIMT_PARTS(__vmaxu2, 16, x < y ? y : x)
SIMT_PARTS(__vmaxu4, 8, x < y ? y : x)
SIMT_PARTS(__vminu2, 16, y < x ? y : x)
SIMT_PARTS(__vminu4, 8, y < x ? y : x)
SIMT_PARTS(__vcmpgeu2, 16, x >= y ? ~0u : 0)
SIMT_PARTS(__vcmpgeu4, 8, x >= y ? ~0u : 0)
SIMT_PARTS(__vcmpgtu2, 16, x > y ? ~0u : 0)
SIMT_PARTS(__vcmpgtu4, 8, x > y ? ~0u : 0)
SIMT_PARTS(__vcmpeq2, 16, x == y ? ~0u : 0)
SIMT_PARTS(__vcmpeq4, 8, x == y ? ~0u : 0)
SIMT_PARTS(__vcmpltu4, 8, x < y ? ~0u : 0)
SIMT_PARTS(__vcmpleu4, 8, x <= y ? ~0u : 0)
#undef SIMT_PARTS
// The larger ones of a + b and c, by halves.
inline uint32_t __viaddmax_s16x2(uint32_t a, uint32_t b, uint32_t c) {
  return simt::by_parts<16>(__vadd2(a, b), c, [](uint32_t x, uint32_t y) -> uint32_t {
    return static_cast<int16_t>(x) < static_cast<int16_t>(y) ? y : x;
  });
}
inline void* __cvta_global_to_generic(uint64_t p) { return reinterpret_cast<void*>(p); }
// The two low bytes of b times the halves of a, and c.
inline uint32_t __dp2a_lo(uint32_t a, uint32_t b, uint32_t c) {
  return c + (a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF);
}
