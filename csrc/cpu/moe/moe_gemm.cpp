// Products of routed rows: the rows of an expert are gathered side by side, all experts run as
// groups of rows, and the results go where they belong. Bits are those of the grouped GEMM.
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <new>

#include "common/check.h"
#include "common/groups.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "mxtile/mx/round.hpp"
#include "te_mx/cpu.h"

namespace te_mx::cpu {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t kRowsAtATime = 32;
constexpr int64_t kSerialBytes = 256 << 10;  // below, waking threads costs more than it saves

int64_t aligned(int64_t bytes) { return round_up(bytes, kAlign); }

int64_t code_row_bytes(const Operand& o) { return is_fp4(o.element) ? ceil_div(o.k, 2) : o.k; }
int64_t scale_row_bytes(const Operand& o) {
  if (is_blockwise(o.scaling)) return 4 * ceil_div(o.k, kWideBlock);
  return ceil_div(o.k, is_nvfp4(o.scaling) ? kSmallBlock : kBlock);
}

// Calls body(row, expert) for the routed rows of experts that are here, in the order of the lists.
template <class Body>
void for_routed(const Routing& r, int64_t experts, const Body& body) {
  const int64_t used = r.num_tokens_post_padded == nullptr
                           ? std::max(r.positions, r.routed)
                           : std::max<int64_t>(r.num_tokens_post_padded[0], 0);
  const auto one = [&](int64_t row, int64_t block) {
    const int64_t expert = r.expert_ids[block];
    if (row >= 0 && row < r.routed && expert >= 0 && expert < experts) body(row, expert);
  };
  if (r.sorted_token_ids == nullptr) {
    const int64_t rows = std::min({r.routed, r.blocks, ceil_div(used, r.block_m)});
    for (int64_t row = 0; row < rows; ++row) one(row, row);
    return;
  }
  const int64_t end = std::min({used, r.positions, r.blocks * r.block_m});
  for (int64_t p = 0; p < end; ++p) one(r.sorted_token_ids[p], p / r.block_m);
}

// The routed rows of one expert after the other.
struct Sorted {
  std::unique_ptr<int64_t[]> starts, ends, rows;
  int64_t count = 0;
  Status status = Status::ok;

  explicit Sorted(const MoeGemmArgs& a)
      : starts(new (std::nothrow) int64_t[static_cast<size_t>(a.experts)]),
        ends(new (std::nothrow) int64_t[static_cast<size_t>(a.experts)]),
        rows(new (std::nothrow) int64_t[static_cast<size_t>(a.routing.routed)]) {
    if (starts == nullptr || ends == nullptr || rows == nullptr) {
      status = Status::unsupported;
      return;
    }
    std::fill_n(ends.get(), a.experts, 0);
    for_routed(a.routing, a.experts, [&](int64_t, int64_t expert) { ++ends[expert], ++count; });
    if (count > a.routing.routed) {  // a row stands at two positions
      status = Status::unsupported;
      return;
    }
    int64_t at = 0;
    for (int64_t e = 0; e < a.experts; ++e) {
      starts[e] = at;
      at += ends[e];
      ends[e] = starts[e];
    }
    for_routed(a.routing, a.experts,
               [&](int64_t row, int64_t expert) { rows[ends[expert]++] = row; });
  }
};

// Where what is gathered, and results that are not where they belong, lie in the workspace; behind
// them that of the grouped GEMM.
struct Places {
  int64_t scales, made, gemm;

  Places(const MoeGemmArgs& a, int64_t count) {
    const int64_t width = a.weights != nullptr ? 4 : element_bytes(a.out_dtype);
    scales = aligned(count * code_row_bytes(a.lhs));
    made = scales + aligned(count * scale_row_bytes(a.lhs));
    gemm = made + aligned(count * a.rhs.rows * width);
  }
};

GroupedGemmArgs product(const MoeGemmArgs& a, const Sorted& sorted, uint8_t* base) {
  const Places p(a, sorted.count);
  GroupedGemmArgs g;
  g.gemm.lhs = a.lhs;
  g.gemm.lhs.codes = base, g.gemm.lhs.scales = base + p.scales;
  g.gemm.lhs.rows = sorted.count;
  g.gemm.rhs = a.rhs;
  Epilogue& e = g.gemm.epilogue;
  e.out = base + p.made, e.ldo = a.rhs.rows;
  e.out_dtype = a.weights != nullptr ? DType::f32 : a.out_dtype;
  e.bias = a.bias, e.bias_dtype = a.bias_dtype;
  g.groups.count = a.experts, g.groups.rows = sorted.count;
  g.groups.starts = sorted.starts.get(), g.groups.ends = sorted.ends.get();
  g.gemm.execution = a.execution;
  g.gemm.execution.workspace = base + p.gemm;
  g.gemm.execution.workspace_bytes = a.execution.workspace_bytes - p.gemm;
  return g;
}

// body(begin, end) over rows of so many bytes.
template <class Body>
void for_rows(int64_t rows, int64_t row_bytes, int threads, const Body& body) {
  if (rows * row_bytes < kSerialBytes) return body(int64_t{0}, rows);
  parallel_for(threads, ceil_div(rows, kRowsAtATime), [&](int64_t item) {
    body(item * kRowsAtATime, std::min(rows, (item + 1) * kRowsAtATime));
  });
}

void gather(const MoeGemmArgs& a, const Sorted& sorted, uint8_t* base) {
  const int64_t codes = code_row_bytes(a.lhs), scales = scale_row_bytes(a.lhs);
  const uint8_t* from = static_cast<const uint8_t*>(a.lhs.scales);
  uint8_t* to = base + Places(a, sorted.count).scales;
  for_rows(sorted.count, codes, a.execution.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = sorted.rows[i] / a.routing.a_div;
      std::memcpy(base + i * codes, a.lhs.codes + row * codes, static_cast<size_t>(codes));
      std::memcpy(to + i * scales, from + row * scales, static_cast<size_t>(scales));
    }
  });
}

// out = round(made * weight)
void write_row(const float* made, float weight, int64_t n, DType dtype, void* out) {
  if (dtype == DType::f32) {
    float* to = static_cast<float*>(out);
    for (int64_t i = 0; i < n; ++i) to[i] = made[i] * weight;
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(out);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(made[i] * weight);
    to[i] = dtype == DType::bf16 ? mxtile::mx::f32_to_bf16(bits) : mxtile::mx::f32_to_f16(bits);
  }
}

void scatter(const MoeGemmArgs& a, const Sorted& sorted, const uint8_t* base) {
  const int64_t n = a.rhs.rows, row_bytes = n * element_bytes(a.out_dtype);
  const uint8_t* made = base + Places(a, sorted.count).made;
  uint8_t* out = static_cast<uint8_t*>(a.out);
  for_rows(sorted.count, row_bytes, a.execution.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint8_t* to = out + sorted.rows[i] * row_bytes;
      if (a.weights == nullptr) {
        std::memcpy(to, made + i * row_bytes, static_cast<size_t>(row_bytes));
      } else {
        const float* sums = reinterpret_cast<const float*>(made) + i * n;
        write_row(sums, a.weights[sorted.rows[i]], n, a.out_dtype, to);
      }
    }
  });
}

Status check(const MoeGemmArgs& a) {
  Status status = check_factor(a.lhs);
  if (status == Status::ok) status = check_factor(a.rhs);
  if (status != Status::ok) return status;
  if (!known(a.out_dtype)) return Status::bad_argument;
  if (a.lhs.layout != Layout::k_last || a.lhs.scaling.block_rows != 1) return Status::unsupported;
  if (a.lhs.tensor_scales != TensorScale::all) return Status::unsupported;
  const Routing& r = a.routing;
  if (a.experts < 0 || r.routed < 0 || r.block_m < 1 || r.a_div < 1 || r.positions < 0 ||
      r.blocks < 0 || r.routed > a.lhs.rows * r.a_div) {
    return Status::bad_argument;
  }
  return Status::ok;
}

}  // namespace

int64_t workspace_bytes(const MoeGemmArgs& a) {
  if (check(a) != Status::ok) return 0;
  const Sorted sorted(a);
  if (sorted.status != Status::ok || sorted.count == 0) return 0;
  return Places(a, sorted.count).gemm + workspace_bytes_grouped(product(a, sorted, nullptr));
}

Status moe_gemm(const MoeGemmArgs& a, uint32_t& ran) {
  ran = 0;
  Status status = check(a);
  if (status != Status::ok) return status;
  const Sorted sorted(a);
  if (sorted.status != Status::ok || sorted.count == 0) return sorted.status;
  uint8_t* base = static_cast<uint8_t*>(a.execution.workspace);
  if (a.execution.workspace_bytes < Places(a, sorted.count).gemm) return Status::small_workspace;
  gather(a, sorted, base);
  status = gemm_grouped(product(a, sorted, base), ran);
  if (status == Status::ok) scatter(a, sorted, base);
  return status;
}

}  // namespace te_mx::cpu
