// The emulated multiprocessor: programs that are right give the numbers that they should in every
// order of events, and every mistake that it knows is found.
#include "simt/cuda.hpp"

#include <cstdio>
#include <vector>

#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/convert.cuh"
#include "mxtile/sm90/copy_async.cuh"
#include "mxtile/sm90/mma.cuh"
#include "mxtile/sm90/multicast.cuh"
#include "mxtile/sm90/shared.cuh"
#include "mxtile/sm90/tensor_map.h"
#include "mxtile/sm90/tma.cuh"
#include "mxtile/sm90/wgmma.cuh"

namespace {

namespace tile = mxtile::sm90;
using tile::Fp8;

int failures = 0;
void check(bool ok, const char* what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED: %s\n", what);
}

template <class... Params, class... Given>
void launch(int ctas, int threads, int cluster, size_t bytes, void (*kernel)(Params...),
            Given... given) {
  simt::Launch made =
      simt::launch_of(dim3(static_cast<unsigned>(ctas)), dim3(static_cast<unsigned>(threads)),
                      bytes, kernel, given...);
  made.cluster = static_cast<uint32_t>(cluster);
  simt::run(made);
}

// Whether a launch says `text` in some order of events.
template <class... Arguments>
void refused(const char* text, Arguments... arguments) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    simt::set_seed(seed);
    try {
      launch(arguments...);
    } catch (const simt::Failure& failure) {
      if (std::string(failure.what()).find(text) != std::string::npos) return;
      std::printf("  it said: %s\n", failure.what());
    }
  }
  check(false, text);
}

// ------------------------------------------------------------------------------------------ copies
// Three stages of 128 bytes, a producer warp and a warp that adds the words up.
constexpr int kStages = 3, kSteps = 20;

template <bool kWaits, bool kEarlyRelease>
void ring(const uint32_t* from, uint32_t* to) {
  auto* const data = simt::shared_bytes<uint32_t>(128);
  auto& bars = simt::shared_variable<uint64_t[2 * kStages]>([] {});
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s)
      tile::mbar_init(bars + s, 1), tile::mbar_init(bars + kStages + s, 1);
    tile::mbar_init_fence();
  }
  __syncthreads();
  uint32_t sum = 0;
  for (int i = 0; i < kSteps; ++i) {
    const int s = i % kStages;
    const uint32_t phase = i / kStages & 1;
    if (warp == 0) {
      if (lane != 0) continue;
      tile::mbar_wait(bars + kStages + s, phase ^ 1);
      tile::mbar_arrive_expect(bars + s, 128);
      tile::bulk_load(tile::smem_addr(data + 32 * s), from + 32 * i, 128,
                      tile::smem_addr(bars + s));
    } else {
      if (kWaits) tile::mbar_wait(bars + s, phase);
      if (kEarlyRelease && lane == 0) tile::mbar_arrive(bars + kStages + s);
      __syncwarp();
      sum += data[32 * s + lane];
      __syncwarp();
      if (!kEarlyRelease && lane == 0) tile::mbar_arrive(bars + kStages + s);
    }
  }
  if (warp == 1) to[lane] = sum;
  __syncthreads();
}

void test_ring() {
  alignas(16) static uint32_t from[32 * kSteps];
  uint32_t want[32] = {};
  for (int i = 0; i < 32 * kSteps; ++i) want[i % 32] += from[i] = static_cast<uint32_t>(i * i + 7);
  int right = 0, without_wait = 0, early = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto sums_are_right = [&](auto kernel) {
      uint32_t got[32];
      simt::set_seed(seed);
      try {
        launch(1, 64, 1, 128 * kStages, kernel, static_cast<const uint32_t*>(from), got);
      } catch (const simt::Failure&) {  // it hung, or left before the last copy came
        return false;
      }
      return std::equal(got, got + 32, want);
    };
    right += sums_are_right(ring<true, false>);
    early += !sums_are_right(ring<true, true>);
    without_wait += !sums_are_right(ring<false, false>);
  }
  check(right == 20, "a ring of stages");
  check(without_wait == 20, "a wait that is missing shows");
  check(early >= 18, "a stage that is given back early shows");
}

void cp_async(const uint4* from, uint4* to) {
  auto& data = simt::shared_variable<uint4[64]>([] {});
  tile::copy16_async(data + threadIdx.x, from + threadIdx.x, true);
  tile::end_copy_group();
  tile::copy16_async(data + 32 + threadIdx.x, nullptr, false);
  tile::end_copy_group();
  tile::wait_copy_groups<1>();
  to[threadIdx.x] = data[threadIdx.x], to[32 + threadIdx.x] = data[32 + threadIdx.x];
  tile::wait_copy_groups<0>();
  to[64 + threadIdx.x] = data[32 + threadIdx.x];
}

void test_cp_async() {
  std::vector<uint4> from(32, uint4{1, 2, 3, 4}), to(96);
  launch(1, 32, 1, size_t{0}, cp_async, static_cast<const uint4*>(from.data()), to.data());
  check(to[5].w == 4, "cp.async");
  check(to[37].w == ~0u, "cp.async is poison until its group is waited for");
  check(to[70].w == 0, "cp.async of zeros");
}

// Every CTA sends its rank to all, who add them up.
void exchange(uint32_t* to) {
  auto& got = simt::shared_variable<uint32_t[8]>([] {});
  auto& bar = simt::shared_variable<uint64_t>([] {});
  const uint32_t rank = tile::cluster_rank();
  if (threadIdx.x == 0) {
    tile::mbar_init(&bar, 1);
    tile::mbar_init_fence();
    tile::mbar_arrive_expect(&bar, 4 * 4);
  }
  tile::cluster_sync();
  if (threadIdx.x < 4) tile::send(got + rank, rank + 1, &bar, threadIdx.x);
  tile::mbar_wait_sent(&bar, 0);
  if (threadIdx.x == 0) to[rank] = got[0] + 10 * got[1] + 100 * got[2] + 1000 * got[3];
}

void test_exchange() {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    simt::set_seed(seed);
    uint32_t to[4];
    launch(4, 32, 4, size_t{0}, exchange, to);
    check(to[0] == 4321 && to[3] == 4321, "remote stores");
  }
}

// Every CTA copies 16 bytes to the next one, and stays until they were read, or does not.
void pass_on(uint4* to, bool stays) {
  auto& data = simt::shared_variable<uint4[2]>([] {});
  auto& bar = simt::shared_variable<uint64_t>([] {});
  const uint32_t rank = tile::cluster_rank();
  tile::mbar_init(&bar, 1);
  tile::mbar_init_fence();
  data[0] = uint4{rank, 1, 2, 3};
  tile::cluster_sync();
  tile::bulk_send(tile::smem_addr(data + 1), tile::smem_addr(data), 16, tile::smem_addr(&bar),
                  (rank + 1) % 4);
  tile::mbar_arrive_expect(&bar, 16);
  tile::mbar_wait_sent(&bar, 0);
  to[rank] = data[1];
  if (stays) tile::cluster_sync();
}

void test_copies_to_others() {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    simt::set_seed(seed);
    std::vector<uint4> to(4);
    launch(4, 1, 4, size_t{0}, pass_on, to.data(), true);
    check(to[1].x == 0 && to[0].x == 3 && to[2].w == 3, "copies to other CTAs");
  }
}

// A box of 32 x 8 fp32 numbers from one matrix to another.
void through_tile(CUtensorMap in, CUtensorMap out, bool add, int inner, int outer) {
  auto* const data = simt::shared_bytes<uint8_t>(1024);
  auto& bar = simt::shared_variable<uint64_t>([] {});
  if (threadIdx.x != 0) return;
  tile::mbar_init(&bar, 1);
  tile::mbar_arrive_expect(&bar, 1024);
  tile::tma_load(data, &in, &bar, inner, outer);
  tile::mbar_wait(&bar, 0);
  add ? tile::tma_reduce_add(&out, data, inner, outer) : tile::tma_store(&out, data, inner, outer);
  tile::tma_store_commit();
  tile::tma_store_wait_all();
}

void test_tiles() {
  constexpr int kRows = 21, kColumns = 136;
  alignas(16) static float from[kRows * kColumns], to[kRows * kColumns + 1];
  for (int i = 0; i < kRows * kColumns; ++i) from[i] = static_cast<float>(i);
  to[kRows * kColumns] = 7.0f;
  CUtensorMap in, out;
  check(tile::tensor_map_2d(in, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, from, kRows, kColumns,
                            kColumns * 4, 8) &&
            tile::tensor_map_2d(out, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, to, kRows, kColumns,
                                kColumns * 4, 8),
        "tensor maps");
  for (const bool add : {false, true}) {
    for (int x = 0; x < kColumns; x += 32) {
      for (int y = 0; y < kRows; y += 8) {
        launch(1, 32, 1, size_t{1024}, through_tile, in, out, add, x, y);
      }
    }
    bool same = true;
    for (int i = 0; i < kRows * kColumns; ++i) same &= to[i] == (add ? 2 : 1) * from[i];
    check(same && to[kRows * kColumns] == 7.0f, add ? "tiles that are added" : "tiles");
  }
}

// ---------------------------------------------------------------------------------------- products
constexpr int kN = 64;

uint8_t code(int row, int k) { return static_cast<uint8_t>((row * 37 + k * 11) % 0x70); }

enum class Way { shared, registers, read_early, no_fence };

template <Way kWay>
void product(float* to) {
  auto* const a = simt::shared_bytes<uint8_t>(1024);
  uint8_t* const b = a + 64 * 128;
  for (int i = threadIdx.x; i < (64 + kN) * 128; i += 128) {
    const uint32_t row = i / 128, k = i % 128;
    a[row * 128 + ((k / 16 ^ row % 8) << 4) + k % 16] = code(static_cast<int>(row), k);
  }
  __syncthreads();
  float d[kN / 2];
  if (kWay != Way::no_fence) tile::wgmma_fence();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int k = 0; k < 128; k += 32) {
    const uint32_t rhs = tile::wgmma_desc(b) + k / 16;
    if (kWay == Way::registers) {
      uint32_t regs[4];
      for (int i = 0; i < 16; ++i) {
        const int row = 16 * warp + lane / 4 + 8 * (i / 4 % 2);
        reinterpret_cast<uint8_t*>(regs)[i] = code(row, k + 16 * (i / 8) + 4 * (lane % 4) + i % 4);
      }
      tile::wgmma_fp8_rs<Fp8::e4m3, Fp8::e5m2>(d, regs, rhs, k != 0);
    } else {
      tile::wgmma_64x64x32<Fp8::e4m3, Fp8::e5m2>(d, tile::wgmma_desc(a) + k / 16, rhs, k != 0);
    }
  }
  tile::wgmma_commit();
  if (kWay != Way::read_early) tile::wgmma_wait<0>();
  for (int i = 0; i < kN / 2; ++i) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
    to[row * kN + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = d[i];
  }
  tile::wgmma_wait<0>();
}

void test_products() {
  std::vector<float> want(64 * kN), got(64 * kN);
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < kN; ++n) {
      double sum = 0;
      for (int k = 0; k < 128; ++k)
        sum += static_cast<double>(simt::fp8_value(simt::Operand::e4m3, code(m, k))) *
               simt::fp8_value(simt::Operand::e5m2, code(64 + n, k));
      want[m * kN + n] = static_cast<float>(sum);
    }
  }
  const auto near = [&] {
    for (int i = 0; i < 64 * kN; ++i) {
      if (!(std::fabs(got[i] - want[i]) <= 1e-5f * std::fabs(want[i]))) return false;
    }
    return true;
  };
  const size_t bytes = (64 + kN) * 128;
  launch(1, 128, 1, bytes, product<Way::shared>, got.data());
  check(near(), "wgmma");
  launch(1, 128, 1, bytes, product<Way::registers>, got.data());
  check(near(), "wgmma with a in registers");
  launch(1, 128, 1, bytes, product<Way::read_early>, got.data());
  check(std::isnan(got[5]), "sums that are read too early show");
  refused("wgmma.fence", 1, 128, 1, bytes, product<Way::no_fence>, got.data());
}

// D[16, 8] of fp16 numbers from ldmatrix, and of codes.
void small_products(float* halves, float* codes) {
  auto& a = simt::shared_variable<__half[16 * 16]>([] {});
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  for (int i = lane; i < 256; i += 32) a[i] = __float2half(static_cast<float>(i % 23 - 9));
  __syncwarp();
  uint32_t regs[4], b[2];
  tile::ldmatrix_x4(regs, tile::smem_addr(a + (lane % 16) * 16 + lane / 16 * 8));
  for (int i = 0; i < 2; ++i) {
    const __half2 v = __floats2half2_rn(static_cast<float>(g + 2 * t + 8 * i),
                                        static_cast<float>(g + 2 * t + 8 * i + 1));
    std::memcpy(b + i, &v, 4);
  }
  float d[4] = {1, 1, 1, 1};
  tile::mma_f16(d, regs, b[0], b[1]);
  for (int i = 0; i < 4; ++i) halves[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
  uint8_t x[16], y[8];
  for (int i = 0; i < 16; ++i) x[i] = code(g + 8 * (i / 4 % 2), 16 * (i / 8) + 4 * t + i % 4);
  for (int i = 0; i < 8; ++i) y[i] = code(100 + g, 16 * (i / 4) + 4 * t + i % 4);
  std::memcpy(regs, x, 16), std::memcpy(b, y, 8);
  float e[4] = {};
  simt::mma_16x8x32(simt::Operand::e4m3, simt::Operand::e4m3, e, regs, b[0], b[1]);
  for (int i = 0; i < 4; ++i) codes[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = e[i];
}

void test_small_products() {
  float halves[128], codes[128];
  launch(1, 32, 1, size_t{0}, small_products, halves, codes);
  bool right = true, right_too = true;
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      float sum = 1;
      double other = 0;
      for (int k = 0; k < 16; ++k)
        sum += static_cast<float>((m * 16 + k) % 23 - 9) * static_cast<float>(n + k);
      for (int k = 0; k < 32; ++k)
        other += static_cast<double>(simt::fp8_value(simt::Operand::e4m3, code(m, k))) *
                 simt::fp8_value(simt::Operand::e4m3, code(100 + n, k));
      right &= halves[m * 8 + n] == sum;
      right_too &= codes[m * 8 + n] == static_cast<float>(other);
    }
  }
  check(right, "mma.sync of fp16 numbers");
  check(right_too, "mma.sync of codes");
}

// ---------------------------------------------------------------------------------------- mistakes
void missing_arrival() {
  auto& bar = simt::shared_variable<uint64_t>([] {});
  if (threadIdx.x == 0) tile::mbar_init(&bar, 33);
  __syncthreads();
  tile::mbar_arrive(&bar);
  tile::mbar_wait(&bar, 0);
}
void no_init() {
  auto& bar = simt::shared_variable<uint64_t>([] {});
  if (threadIdx.x == 0) tile::mbar_init(&bar, 1);
  if (threadIdx.x == 1) tile::mbar_arrive(&bar);  // who says that it is there?
}
void apart() { threadIdx.x == 0 ? __syncwarp() : static_cast<void>(__any_sync(~0u, 1)); }
void not_all() {
  if (threadIdx.x < 16) __syncthreads();
  __syncwarp();
}
void misaligned() {
  auto& data = simt::shared_variable<uint32_t[8]>([] {});
  tile::load_shared16(tile::smem_addr(data + 1));
}
void outside() { tile::ld_shared_u32(simt::kSharedBase + 4096); }
void leaves_early(const uint4* from) {
  auto& data = simt::shared_variable<uint4[32]>([] {});
  tile::copy16_async(data + threadIdx.x, from + threadIdx.x, true);
}
void leaves_cluster() {
  auto& bar = simt::shared_variable<uint64_t>([] {});
  if (threadIdx.x == 0) tile::mbar_init(&bar, 32);
  tile::cluster_sync();
  if (tile::cluster_rank() == 1) return;
  tile::mbar_arrive_at(&bar, 1);
}
void waits_for_nothing(const uint32_t* flag) {
  while (*static_cast<const volatile uint32_t*>(flag) == 0) __nanosleep(100);
}
void later_cta(uint32_t* flag) {
  if (blockIdx.x == 3) {
    *flag = 1;
  } else {
    waits_for_nothing(flag);
  }
}

void test_mistakes() {
  const std::vector<uint4> from(32);
  uint32_t flag = 0;
  refused("misses 1 arrivals", 1, 32, 1, size_t{0}, missing_arrival);
  refused("there is no mbarrier", 1, 32, 1, size_t{0}, no_init);
  refused("lanes of a warp part", 1, 32, 1, size_t{0}, apart);
  refused("nobody can go on", 1, 32, 1, size_t{0}, not_all);
  refused("not a multiple of 16", 1, 32, 1, size_t{0}, misaligned);
  refused("is outside of", 1, 32, 1, size_t{0}, outside);
  refused("on their way", 1, 32, 1, size_t{0}, leaves_early,
          static_cast<const uint4*>(from.data()));
  refused("a CTA that has left", 2, 32, 2, size_t{0}, leaves_cluster);
  std::vector<uint4> sent(4);
  refused("was still to be sent", 4, 1, 4, size_t{0}, pass_on, sent.data(), false);
  refused("wait in vain", 1, 32, 1, size_t{0}, waits_for_nothing,
          static_cast<const uint32_t*>(&flag));
  launch(4, 32, 1, size_t{0}, later_cta, &flag);
  check(flag == 1, "CTAs start while others wait for what they write");
}

void test_codes() {
  bool right = true;
  for (const auto type : {simt::Operand::e4m3, simt::Operand::e5m2}) {
    for (int i = 0; i < 256; ++i) {
      const float v = simt::fp8_value(type, static_cast<uint8_t>(i));
      if (std::isfinite(v)) right &= simt::fp8_code(type, v) == i;
      right &=
          std::isnan(v) || simt::half_value(simt::fp8_half(type, static_cast<uint8_t>(i))) == v;
    }
  }
  // Halves to even, at a normal number, below the smallest, and above the largest.
  right &= simt::fp8_code(simt::Operand::e4m3, 1.0625f) == 0x38;
  right &= simt::fp8_code(simt::Operand::e4m3, 1.1875f) == 0x3A;
  right &= simt::fp8_code(simt::Operand::e4m3, 0x1p-10f) == 0;
  right &= simt::fp8_code(simt::Operand::e4m3, 0x1.8p-9f) == 2;
  right &= simt::fp8_code(simt::Operand::e5m2, -1e9f) == 0xFB;
  check(right, "codes");
}

}  // namespace

int main() {
  test_ring();
  test_cp_async();
  test_exchange();
  test_copies_to_others();
  test_tiles();
  test_products();
  test_small_products();
  test_mistakes();
  test_codes();
  if (failures == 0) std::printf("ok\n");
  return failures != 0;
}
