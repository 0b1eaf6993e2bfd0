#include "simt/tensor_cores.hpp"

#include <array>
#include <cmath>
#include <limits>

namespace simt {
namespace {

// ------------------------------------------------------------------------------------------
// numbers
struct Tables {
  std::vector<float> half = std::vector<float>(65536);
  float fp8[2][256];
  uint16_t fp8_halves[2][256];

  static float number(uint32_t bits, int exponent_bits, int mantissa_bits, bool infinities) {
    const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
    const uint32_t exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
    const bool minus = bits >> (mantissa_bits + exponent_bits) & 1;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    float v;
    if (infinities && exponent == (1u << exponent_bits) - 1) {
      v = mantissa == 0 ? std::numeric_limits<float>::infinity() : NAN;
    } else if (exponent == 0) {
      v = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
    } else {
      v = std::ldexp(static_cast<float>(mantissa | 1u << mantissa_bits),
                     static_cast<int>(exponent) - bias - mantissa_bits);
    }
    return minus ? -v : v;
  }

  Tables() {
    for (uint32_t i = 0; i < 65536; ++i) half[i] = number(i, 5, 10, true);
    for (uint32_t i = 0; i < 256; ++i) {
      fp8[0][i] = (i & 0x7F) == 0x7F ? NAN : number(i, 4, 3, false);
      fp8[1][i] = number(i, 5, 2, true);
      fp8_halves[1][i] = fp8[1][i] == fp8[1][i] ? static_cast<uint16_t>(i << 8) : 0x7FFF;
      fp8_halves[0][i] = 0x7FFF;
    }
    for (uint32_t i = 0; i < 65536; ++i) {
      for (uint32_t c = i >> 15 << 7; c < (i >> 15 << 7) + 127; ++c) {
        if (half[i] == fp8[0][c] && std::signbit(half[i]) == std::signbit(fp8[0][c]))
          fp8_halves[0][c] = static_cast<uint16_t>(i);
      }
    }
  }
};
const Tables tables;

float bf16_value(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float v;
  std::memcpy(&v, &wide, 4);
  return v;
}

float value16(Operand type, uint16_t bits) {
  return type == Operand::f16 ? tables.half[bits] : bf16_value(bits);
}

}  // namespace

float half_value(uint16_t bits) { return tables.half[bits]; }
float fp8_value(Operand type, uint8_t code) {
  return tables.fp8[type == Operand::e5m2 ? 1 : 0][code];
}

uint16_t fp8_half(Operand type, uint8_t code) {
  return tables.fp8_halves[type == Operand::e5m2 ? 1 : 0][code];
}

uint8_t fp8_code(Operand type, float value) {
  const bool wide = type == Operand::e5m2;
  const int mantissa_bits = wide ? 2 : 3, lowest = wide ? -14 : -6;
  const float most = wide ? 57344.0f : 448.0f;
  if (std::isnan(value)) return 0x7F;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= most) return sign | (wide ? 0x7B : 0x7E);
  int exponent = magnitude == 0.0f ? lowest : std::ilogb(magnitude);
  if (exponent < lowest) exponent = lowest;
  // Steps of the binade; a carry goes into the exponent by itself. The host rounds to even.
  const float steps = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  return sign |
         static_cast<uint8_t>(((exponent - lowest) << mantissa_bits) + static_cast<int>(steps));
}

// ---------------------------------------------------------------------------------------- mma.sync
void mma_16x8x16(Operand type, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Lane {
    float a[8], b[4];
  } mine;
  const uint32_t bs[2] = {b0, b1};
  for (int i = 0; i < 8; ++i) mine.a[i] = value16(type, a[i / 2] >> (16 * (i % 2)) & 0xFFFF);
  for (int i = 0; i < 4; ++i) mine.b[i] = value16(type, bs[i / 2] >> (16 * (i % 2)) & 0xFFFF);
  const int g = self().lane / 4, t = self().lane % 4;
  Gather& all = gather(~0u, "mma.sync", &mine, sizeof mine);
  const auto lane = [&](int i) { return reinterpret_cast<const Lane*>(all.values[i]); };
  for (int r = 0; r < 2; ++r) {
    for (int c = 0; c < 2; ++c) {
      double sum = 0;
      for (int s = 0; s < 4; ++s) {
        const float* const from_a = lane(4 * g + s)->a;
        const float* const from_b = lane(4 * (2 * t + c) + s)->b;
        for (int half = 0; half < 2; ++half) {
          for (int i = 0; i < 2; ++i) {
            sum += static_cast<double>(from_a[4 * half + 2 * r + i]) * from_b[2 * half + i];
          }
        }
      }
      d[2 * r + c] = static_cast<float>(d[2 * r + c] + sum);
    }
  }
  leave(all);
}

void mma_16x8x32(Operand a_type, Operand b_type, float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                 uint32_t b1) {
  struct Lane {
    uint8_t a[16], b[8];
  } mine;
  std::memcpy(mine.a, a, 16);
  std::memcpy(mine.b, &b0, 4), std::memcpy(mine.b + 4, &b1, 4);
  const int g = self().lane / 4, t = self().lane % 4;
  Gather& all = gather(~0u, "mma.sync", &mine, sizeof mine);
  const auto lane = [&](int i) { return reinterpret_cast<const Lane*>(all.values[i]); };
  for (int r = 0; r < 2; ++r) {
    for (int c = 0; c < 2; ++c) {
      double sum = 0;
      for (int s = 0; s < 4; ++s) {
        const uint8_t* const from_a = lane(4 * g + s)->a;
        const uint8_t* const from_b = lane(4 * (2 * t + c) + s)->b;
        for (int i = 0; i < 8; ++i) {
          const int register_a = 2 * (i / 4) + r;
          sum += static_cast<double>(fp8_value(a_type, from_a[4 * register_a + i % 4])) *
                 fp8_value(b_type, from_b[i]);
        }
      }
      d[2 * r + c] = static_cast<float>(d[2 * r + c] + sum);
    }
  }
  leave(all);
}

// ------------------------------------------------------------------------------------------- wgmma
namespace {

// Accumulators of a warpgroup in flight.
struct Sums {
  int n = 0;
  uint64_t last = 0;  // the last product that adds to them
  int held = 0;       // threads whose registers they are
  std::vector<float> v;
};

struct Product {
  Wgmma what;
  std::shared_ptr<Sums> sums;
  int issued = 0;
  std::vector<std::array<uint32_t, 4>> a;  // registers of 128 threads
};

struct Held {
  float* d;
  std::shared_ptr<Sums> sums;
};

}  // namespace

struct WarpGroup {
  std::deque<Product> products;
  uint64_t done = 0;  // number of products.front()
  std::vector<Thread*> waiting;
  struct Of {
    uint64_t issued = 0;
    std::deque<uint64_t> groups;  // products issued before the end of each
    std::vector<Held> held;
    bool fenced = false;
  } of[128];
};

void WarpGroupDelete::operator()(WarpGroup* group) const { delete group; }

namespace {

WarpGroup& my_group() {
  Thread& me = self();
  auto& group = me.cta->groups[me.number / 128];
  if (group == nullptr) group.reset(new WarpGroup);
  return *group;
}

// Row and column of register i of thread t.
int row_of(int t, int i) { return 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2); }
int col_of(int t, int i) { return 8 * (i / 4) + 2 * (t % 4) + i % 2; }

void take(Sums& sums, int t, const float* d) {
  for (int i = 0; i < sums.n / 2; ++i) sums.v[row_of(t, i) * sums.n + col_of(t, i)] = d[i];
}
void give(const Sums& sums, int t, float* d) {
  for (int i = 0; i < sums.n / 2; ++i) d[i] = sums.v[row_of(t, i) * sums.n + col_of(t, i)];
}
void poison(float* d, int count) { std::memset(d, kPoison, count * sizeof(float)); }

struct Descriptor {
  uint32_t start, leading, stride, swizzle;
  explicit Descriptor(uint64_t bits)
      : start(static_cast<uint32_t>(bits & 0x3FFF) << 4),
        leading(static_cast<uint32_t>(bits >> 16 & 0x3FFF) << 4),
        stride(static_cast<uint32_t>(bits >> 32 & 0x3FFF) << 4),
        swizzle(static_cast<uint32_t>(bits >> 62)) {
    if ((bits >> 49 & 7) != 0) fail("a wgmma descriptor with a base offset");
  }
};

const uint8_t* byte_at(const Cta& cta, uint32_t address, bool swizzle) {
  if (swizzle) address ^= (address >> 7 & 7) << 4;
  if (address < kSharedBase || address >= cta.shared_end)
    fail("wgmma reads outside shared memory, at " + std::to_string(address));
  return cta.shared + address;
}

// Rows of 32 bytes of a K-major operand, 128-byte or no swizzle.
void read_rows(const Cta& cta, uint64_t bits, int rows, uint8_t* to) {
  const Descriptor d(bits);
  if (d.swizzle > 1) fail("wgmma operands lie under the 128-byte swizzle or none");
  for (int r = 0; r < rows; ++r) {
    for (uint32_t chunk = 0; chunk < 2; ++chunk) {
      const uint32_t at = d.swizzle == 1
                              ? d.start + r / 8 * d.stride + r % 8 * 128 + chunk * 16
                              : d.start + r / 8 * d.stride + r % 8 * 16 + chunk * d.leading;
      const uint8_t* const from = byte_at(cta, at, d.swizzle == 1);
      std::memcpy(to + r * 32 + chunk * 16, from, 16);
    }
  }
}

// [64, 32 bytes] of an operand of 16 bits that lies as [16, 64].
void read_transposed(const Cta& cta, uint64_t bits, uint8_t* to) {
  const Descriptor d(bits);
  if (d.swizzle != 1) fail("a transposed wgmma operand lies under the 128-byte swizzle");
  for (int k = 0; k < 16; ++k) {
    for (int m = 0; m < 64; ++m) {
      const uint32_t at = d.start + k / 8 * d.stride + k % 8 * 128 + m * 2;
      std::memcpy(to + m * 32 + k * 2, byte_at(cta, at, true), 2);
    }
  }
}

void to_numbers(Operand type, const uint8_t* from, int rows, int k, double* to) {
  for (int i = 0; i < rows * k; ++i) {
    if (type == Operand::e4m3 || type == Operand::e5m2) {
      to[i] = fp8_value(type, from[i]);
    } else {
      uint16_t bits;
      std::memcpy(&bits, from + 2 * i, 2);
      to[i] = value16(type, bits);
    }
  }
}

void run_product(const Cta& cta, Product& p) {
  const Wgmma& w = p.what;
  const int k = w.a_type == Operand::e4m3 || w.a_type == Operand::e5m2 ? 32 : 16;
  std::vector<uint8_t> a(64 * 32), b(w.n * 32);
  if (w.a_registers != nullptr) {
    for (int t = 0; t < 128; ++t) {
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * (t / 32) + t % 32 / 4 + 8 * (i % 2);
        std::memcpy(&a[row * 32 + 16 * (i / 2) + 4 * (t % 4)], &p.a[t][i], 4);
      }
    }
  } else if (w.a_transposed) {
    read_transposed(cta, w.a, a.data());
  } else {
    read_rows(cta, w.a, 64, a.data());
  }
  read_rows(cta, w.b, w.n, b.data());
  std::vector<double> an(64 * k), bn(w.n * k), turned(w.n * k), sums(w.n);
  to_numbers(w.a_type, a.data(), 64, k, an.data());
  to_numbers(w.b_type, b.data(), w.n, k, bn.data());
  for (int n = 0; n < w.n; ++n) {
    for (int i = 0; i < k; ++i) turned[i * w.n + n] = bn[n * k + i];
  }
  for (int m = 0; m < 64; ++m) {
    for (double& s : sums) s = 0;
    for (int i = 0; i < k; ++i) {
      const double factor = an[m * k + i];
      const double* const row = &turned[i * w.n];
      double* const to = sums.data();
      for (int n = 0; n < w.n; ++n) to[n] += factor * row[n];
    }
    float* const to = &p.sums->v[m * w.n];
    for (int n = 0; n < w.n; ++n)
      to[n] = static_cast<float>((w.accumulate ? to[n] : 0.0) + sums[n]);
  }
}

bool same(const Wgmma& a, const Wgmma& b) {
  return a.a_type == b.a_type && a.b_type == b.b_type && a.n == b.n && a.b == b.b &&
         (a.a_registers == nullptr) == (b.a_registers == nullptr) &&
         (a.a_registers != nullptr || a.a == b.a) && a.a_transposed == b.a_transposed &&
         a.accumulate == b.accumulate;
}

}  // namespace

void wgmma(const Wgmma& what, float* d) {
  Thread& me = self();
  WarpGroup& group = my_group();
  const int t = static_cast<int>(me.number % 128);
  WarpGroup::Of& mine = group.of[t];
  Held* held = nullptr;
  for (Held& one : mine.held) {
    if (one.d == d) held = &one;
  }
  if (held == nullptr && !mine.fenced) fail("wgmma on registers that no wgmma.fence came after");
  const uint64_t number = mine.issued++;
  if (number < group.done) fail("wgmma: the warps of a warpgroup part");
  const size_t place = number - group.done;
  if (place == group.products.size()) {
    Product p;
    p.what = what;
    if (held != nullptr) {
      p.sums = held->sums;
    } else {
      p.sums = std::make_shared<Sums>();
      p.sums->n = what.n, p.sums->v.resize(64 * what.n);
    }
    p.sums->last = number;
    if (what.a_registers != nullptr) p.a.resize(128);
    group.products.push_back(std::move(p));
  }
  Product& p = group.products[place];
  if (!same(p.what, what)) fail("wgmma: threads of a warpgroup ask for different products");
  if (held == nullptr) {
    if (p.sums->held == 128) fail("wgmma: threads of a warpgroup use accumulators differently");
    take(*p.sums, t, d);
    ++p.sums->held;
    mine.held.push_back({d, p.sums});
  } else if (held->sums != p.sums) {
    fail("wgmma: threads of a warpgroup use accumulators differently");
  }
  poison(d, what.n / 2);
  if (what.a_registers != nullptr) std::memcpy(p.a[t].data(), what.a_registers, 16);
  if (++p.issued == 128) wake_all(group.waiting);
}

void wgmma_fence() { my_group().of[self().number % 128].fenced = true; }

void wgmma_commit() {
  WarpGroup::Of& mine = my_group().of[self().number % 128];
  mine.groups.push_back(mine.issued);
}

void wgmma_wait(size_t pending) {
  WarpGroup& group = my_group();
  const int t = static_cast<int>(self().number % 128);
  WarpGroup::Of& mine = group.of[t];
  uint64_t until = 0;
  while (mine.groups.size() > pending) until = mine.groups.front(), mine.groups.pop_front();
  if (until == 0) return;
  while (group.done < until) {
    if (group.products.front().issued < 128) {
      group.waiting.push_back(&self());
      block("the rest of its warpgroup at a wgmma", group.done);
      continue;
    }
    run_product(*self().cta, group.products.front());
    group.products.pop_front();
    ++group.done;
  }
  for (size_t i = 0; i < mine.held.size();) {
    Held& held = mine.held[i];
    if (held.sums->last >= until) {
      ++i;
      continue;
    }
    give(*held.sums, t, held.d);
    mine.held.erase(mine.held.begin() + static_cast<std::ptrdiff_t>(i));
    mine.fenced = false;
  }
}

void check_left(Thread& thread) {
  const auto& group = thread.cta->groups[thread.number / 128];
  if (group != nullptr && !group->of[thread.number % 128].held.empty())
    fail("left the kernel while its wgmma are in flight");
}

}  // namespace simt
