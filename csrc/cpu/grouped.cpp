// Grouped problems: one task a group, each the ordinary quantize(), pack() or gemm() on a part of
// the operands. The crew lets small groups run side by side and shares the items of large ones.
#include "te_mx/cpu_grouped.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "crew.h"
#include "fresh_memory.h"
#include "gemm_internal.hpp"
#include "parallel.h"

namespace te_mx {
namespace {

constexpr int64_t kScratchBytes = 256 << 20;  // bounds how many groups hold a workspace at a time
constexpr int64_t kSerialProducts = 256 * 1024, kSerialElements = 64 * 1024;  // as for one group

bool groups_ok(const Groups& g, int64_t rows) {
  if (g.count < 0 || (g.count > 0 && (g.starts == nullptr || g.ends == nullptr))) return false;
  int64_t at = 0;
  for (int64_t i = 0; i < g.count; ++i) {
    if (g.starts[i] < at || g.ends[i] < g.starts[i]) return false;
    at = g.ends[i];
  }
  return at <= rows;
}

int64_t size_of(const Groups& g, int64_t i) { return g.ends[i] - g.starts[i]; }

// First scale row of a group.
int64_t first_block(const Groups& g, int64_t i) { return g.starts[i] / kBlock + i; }

// Calls body(first, end) for the rows before, between and behind the groups.
template <class Body>
void for_gaps(const Groups& g, int64_t rows, const Body& body) {
  int64_t at = 0;
  for (int64_t i = 0; i <= g.count; ++i) {
    const int64_t next = i < g.count ? g.starts[i] : rows;
    if (next > at) body(at, next);
    if (i < g.count) at = g.ends[i];
  }
}

void zero_rows(void* base, int64_t row_bytes, int64_t begin, int64_t end) {
  if (base == nullptr || end <= begin) return;
  std::memset(static_cast<char*>(base) + begin * row_bytes, 0,
              static_cast<size_t>((end - begin) * row_bytes));
}

template <class T>
T* offset(T* base, int64_t by) {
  return base == nullptr ? nullptr : base + by;
}

int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// The first error of several tasks.
class FirstError {
 public:
  void add(Status status) {
    int32_t ok = 0;
    if (status != Status::ok) value_.compare_exchange_strong(ok, static_cast<int32_t>(status));
  }
  Status get() const { return static_cast<Status>(value_.load()); }

 private:
  std::atomic<int32_t> value_{0};
};

QuantizeArgs group_of(const GroupedQuantizeArgs& args, int64_t i) {
  QuantizeArgs a = args.all;
  const int64_t start = args.groups.starts[i], cols = a.cols;
  a.x = static_cast<const char*>(a.x) + start * a.row_stride * element_bytes(a.x_dtype);
  a.rows = size_of(args.groups, i);
  a.row_codes = offset(a.row_codes, start * cols);
  a.row_scales = offset(a.row_scales, start * ceil_div(cols, kBlock));
  a.col_codes = offset(a.col_codes, start * cols);
  a.col_scales = offset(a.col_scales, first_block(args.groups, i) * cols);
  a.col_sum = offset(a.col_sum, i * cols);
  a.col_sum_ws = offset(a.col_sum_ws, (start / kColSumRows + i) * cols);
  return a;
}

void zero_unused(const GroupedQuantizeArgs& args) {
  const QuantizeArgs& a = args.all;
  const Groups& g = args.groups;
  for_gaps(g, a.rows, [&](int64_t begin, int64_t end) {
    zero_rows(a.row_codes, a.cols, begin, end);
    zero_rows(a.row_scales, ceil_div(a.cols, kBlock), begin, end);
    zero_rows(a.col_codes, a.cols, begin, end);
  });
  int64_t at = 0;
  for (int64_t i = 0; i <= g.count; ++i) {
    const int64_t next = i < g.count ? first_block(g, i) : a.rows / kBlock + g.count;
    zero_rows(a.col_scales, a.cols, at, next);
    if (i < g.count) at = next + ceil_div(size_of(g, i), kBlock);
  }
}

}  // namespace

// Bytes of codes that lie one after another; 0 when they do not.
static int64_t stacked_bytes(const QuantizeArgs* args, int64_t count,
                             uint8_t* QuantizeArgs::* codes) {
  const int64_t each = args[0].rows * args[0].cols;
  for (int64_t i = 0; i < count; ++i) {
    if (args[i].*codes != args[0].*codes + i * each) return 0;
  }
  return count * each;
}

static int64_t code_directions(const QuantizeArgs& a) {
  return (a.row_codes != nullptr) + (a.col_codes != nullptr);
}

Status quantize_many(const QuantizeArgs* args, int64_t count, int threads) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += args[i].rows * args[i].cols;
  if (count > 0 && args[0].row_codes != nullptr) {
    advise_huge_pages(args[0].row_codes, stacked_bytes(args, count, &QuantizeArgs::row_codes));
  }
  if (count > 0 && args[0].col_codes != nullptr) {
    advise_huge_pages(args[0].col_codes, stacked_bytes(args, count, &QuantizeArgs::col_codes));
  }
  if (total < kSerialElements) threads = 1;
  const int64_t directions = count > 0 ? code_directions(args[0]) : 0;
  FirstError error;
  parallel_tasks(threads, count, threads, [&](int64_t i, int) {
    QuantizeArgs a = args[i];
    a.threads = threads;
    a.together = total * directions;
    error.add(quantize(a));
  });
  return error.get();
}

Status quantize_grouped(const GroupedQuantizeArgs& args) {
  const QuantizeArgs& a = args.all;
  if (a.rows < 0 || a.cols < 0 || !groups_ok(args.groups, a.rows)) return Status::bad_argument;
  if (a.col_codes != nullptr && a.col_transposed) return Status::unsupported;
  const int threads = a.rows * a.cols < kSerialElements ? 1 : a.threads;
  advise_huge_pages(a.row_codes, a.rows * a.cols);
  advise_huge_pages(a.col_codes, a.rows * a.cols);
  zero_unused(args);
  FirstError error;
  parallel_tasks(threads, args.groups.count, threads, [&](int64_t i, int) {
    QuantizeArgs group = group_of(args, i);
    group.threads = threads;
    group.together = a.rows * a.cols * code_directions(a);
    error.add(quantize(group));
  });
  return error.get();
}

namespace {

// Operand i of several that lie one after another.
Operand stacked(const Operand& first, int64_t i, int64_t packed_stride) {
  Operand o = first;
  o.codes += i * o.rows * o.k;
  o.scales += i * o.rows * ceil_div(o.k, kBlock);
  if (o.packed != nullptr) o.packed = static_cast<const char*>(o.packed) + i * packed_stride;
  return o;
}

// Rows [starts[i], ends[i]) of an operand whose rows are grouped.
Operand grouped_rows(const Operand& all, const Groups& g, int64_t i) {
  Operand o = all;
  o.codes += g.starts[i] * o.code_row_stride;
  o.scales += g.starts[i] * o.scale_row_stride;
  o.rows = size_of(g, i);
  return o;
}

// The part of k that belongs to group i.
Operand grouped_k(const Operand& all, const Groups& g, int64_t i) {
  Operand o = all;
  o.codes += g.starts[i] * o.code_k_stride;
  o.scales += first_block(g, i) * o.scale_block_stride;
  o.k = size_of(g, i);
  return o;
}

GemmArgs group_of(const GroupedGemmArgs& args, int64_t i) {
  GemmArgs a{};
  const Groups& g = args.groups;
  const int64_t n = args.rhs.rows;
  int64_t out_row = 0;
  if (args.ragged_k) {
    a.lhs = grouped_k(args.lhs, g, i);
    a.rhs = grouped_k(args.rhs, g, i);
    out_row = i * args.lhs.rows;
  } else {
    a.lhs = grouped_rows(args.lhs, g, i);
    a.rhs = stacked(args.rhs, i, args.packed_stride);
    out_row = g.starts[i];
  }
  const bool few = a.lhs.rows <= kStreamMaxRows;
  a.kernel = few ? args.kernels.few_rows : args.kernels.many_rows;
  if (a.kernel != args.kernels.many_rows) a.rhs.packed = nullptr;
  const int64_t bytes = element_bytes(args.out_dtype);
  a.out = args.out == nullptr ? nullptr : static_cast<char*>(args.out) + out_row * n * bytes;
  a.out_dtype = args.out_dtype;
  a.ldo = n;
  a.accumulate = args.accumulate;
  if (args.bias != nullptr) {
    a.bias = static_cast<const char*>(args.bias) + i * n * element_bytes(args.bias_dtype);
  }
  a.bias_dtype = args.bias_dtype;
  return a;
}

struct Schedule {
  int64_t group_bytes;  // workspace of one group
  int members;          // groups that run at a time
  int64_t products;     // of all groups
};

Schedule schedule(const GroupedGemmArgs& args) {
  Schedule s{0, 1, 0};
  for (int64_t i = 0; i < args.groups.count; ++i) {
    const GemmArgs a = group_of(args, i);
    s.group_bytes = std::max(s.group_bytes, round_up(workspace_bytes(a), 64));
    s.products += a.lhs.rows * a.rhs.rows * a.lhs.k;
  }
  int64_t members = std::min<int64_t>(args.threads, args.groups.count);
  if (s.group_bytes > 0) members = std::min(members, kScratchBytes / s.group_bytes);
  s.members = static_cast<int>(std::max<int64_t>(members, 1));
  return s;
}

bool gemm_ok(const GroupedGemmArgs& args) {
  const int64_t ragged = args.ragged_k ? args.lhs.k : args.lhs.rows;
  if (args.lhs.rows < 0 || args.rhs.rows < 0 || !groups_ok(args.groups, ragged)) return false;
  if (args.ragged_k && (args.lhs.packed != nullptr || args.rhs.packed != nullptr)) return false;
  return args.lhs.k == args.rhs.k && args.lhs.packed == nullptr;
}

}  // namespace

Status pack_many(Kernel kernel, Role role, const Operand& first, int64_t count, void* packed,
                 int64_t stride, int threads) {
  advise_huge_pages(packed, count * stride);
  FirstError error;
  parallel_tasks(threads, count, threads, [&](int64_t i, int) {
    error.add(
        pack(kernel, role, stacked(first, i, 0), static_cast<char*>(packed) + i * stride, threads));
  });
  return error.get();
}

int64_t workspace_bytes_grouped(const GroupedGemmArgs& args) {
  if (!gemm_ok(args)) return 0;
  const Schedule s = schedule(args);
  return s.group_bytes * s.members;
}

Status gemm_grouped(GroupedGemmArgs& args) {
  args.ran = 0;
  if (!gemm_ok(args)) return Status::bad_argument;
  const Schedule s = schedule(args);
  if (s.group_bytes * s.members > args.workspace_bytes) return Status::small_workspace;
  const int64_t out_rows = args.ragged_k ? args.groups.count * args.lhs.rows : args.lhs.rows;
  const int64_t row_bytes = args.rhs.rows * element_bytes(args.out_dtype);
  advise_huge_pages(args.out, out_rows * row_bytes);
  if (!args.ragged_k && !args.accumulate) {
    for_gaps(args.groups, args.lhs.rows,
             [&](int64_t begin, int64_t end) { zero_rows(args.out, row_bytes, begin, end); });
  }
  const int threads = s.products < kSerialProducts ? 1 : args.threads;
  FirstError error;
  std::atomic<uint32_t> ran{0};
  parallel_tasks(threads, args.groups.count, s.members, [&](int64_t i, int member) {
    GemmArgs a = group_of(args, i);
    if (a.lhs.rows == 0) return;
    // A group is cut for its share of the threads: finer cuts only read operands more often.
    const int64_t products = a.lhs.rows * a.rhs.rows * a.lhs.k;
    const int64_t share = s.products == 0 ? 0 : 2 * threads * products / s.products + 1;
    a.threads = static_cast<int>(std::clamp<int64_t>(share, std::min(threads, 2), threads));
    a.workspace = static_cast<char*>(args.workspace) + member * s.group_bytes;
    a.workspace_bytes = s.group_bytes;
    a.together = out_rows * row_bytes;
    error.add(gemm(a));
    if (products > 0) ran.fetch_or(1u << static_cast<int>(a.ran));
  });
  args.ran = ran.load();
  return error.get();
}

}  // namespace te_mx
