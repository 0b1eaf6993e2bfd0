// Quantizing groups: one task a group, each the ordinary quantize() on a part of the matrix. The
// team of tasks lets small groups run side by side and shares the items of large ones.
#include <initializer_list>

#include "common/check.h"
#include "common/fresh_memory.h"
#include "common/groups.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "common/task_team.h"
#include "quantize/blockwise.hpp"
#include "quantize/quantize.hpp"
#include "quantize/quantize_task.h"
#include "te_mx/cpu.h"

namespace te_mx::cpu {
namespace {

constexpr int64_t kSerialElements = 64 * 1024;  // as for one group

template <class T>
T* offset(T* base, int64_t by) {
  return base == nullptr ? nullptr : base + by;
}

QuantizeTask group_of(const QuantizeTask& all, const Bounds& groups, int64_t i) {
  QuantizeTask a = all;
  const int64_t start = groups.starts[i], cols = a.cols;
  a.x = static_cast<const char*>(a.x) + start * a.row_stride * element_bytes(a.x_dtype);
  a.rows = groups.size(i);
  a.first += start;
  a.row_codes = offset(a.row_codes, start * quantize_tile::code_bytes(a.element, cols));
  a.row_scales = offset(a.row_scales, start * ceil_div(cols, kBlock));
  a.col_codes = offset(a.col_codes, start * cols);
  a.col_scales = offset(a.col_scales, groups.first_block(i) * cols);
  a.col_sum = offset(a.col_sum, i * cols);
  a.col_sum_ws = offset(a.col_sum_ws, (start / kColSumRows + i) * cols);
  return a;
}

void zero_unused(const QuantizeTask& a, const Bounds& g) {
  for_gaps(g, a.rows, [&](int64_t begin, int64_t end) {
    zero_rows(a.row_codes, quantize_tile::code_bytes(a.element, a.cols), begin, end);
    zero_rows(a.row_scales, ceil_div(a.cols, kBlock), begin, end);
    zero_rows(a.col_codes, a.cols, begin, end);
  });
  int64_t at = 0;
  for (int64_t i = 0; i <= g.count; ++i) {
    const int64_t next = i < g.count ? g.first_block(i) : a.rows / kBlock + g.count;
    zero_rows(a.col_scales, a.cols, at, next);
    if (i < g.count) at = next + ceil_div(g.size(i), kBlock);
  }
}

// The same of fp32 scales.
QuantizeArgs group_of(const QuantizeArgs& all, const Bounds& groups, int64_t i) {
  QuantizeArgs a = all;
  const int64_t start = groups.starts[i], cols = a.x.cols;
  a.x.data = static_cast<const char*>(a.x.data) + start * a.x.row_stride * element_bytes(a.x.dtype);
  a.x.rows = groups.size(i);
  QuantizeOut& to = a.to;
  to.row.codes = offset(to.row.codes, start * cols);
  to.row.scales = offset(static_cast<float*>(to.row.scales), start * ceil_div(cols, kWideBlock));
  to.col.codes = offset(to.col.codes, start * cols);
  to.col.scales =
      offset(static_cast<float*>(to.col.scales), groups.first_block(i, kWideBlock) * cols);
  to.col_sum = offset(static_cast<float*>(to.col_sum), i * cols);
  to.col_sum_ws = offset(to.col_sum_ws, (start / kColSumRows + i) * cols);
  return a;
}

void zero_unused(const QuantizeArgs& a, const Bounds& g) {
  constexpr int64_t kScale = sizeof(float);
  const int64_t rows = a.x.rows, cols = a.x.cols;
  for_gaps(g, rows, [&](int64_t begin, int64_t end) {
    zero_rows(a.to.row.codes, cols, begin, end);
    zero_rows(a.to.row.scales, ceil_div(cols, kWideBlock) * kScale, begin, end);
    zero_rows(a.to.col.codes, cols, begin, end);
  });
  int64_t at = 0;
  for (int64_t i = 0; i <= g.count; ++i) {
    const int64_t next = i < g.count ? g.first_block(i, kWideBlock) : rows / kWideBlock + g.count;
    zero_rows(a.to.col.scales, cols * kScale, at, next);
    if (i < g.count) at = next + ceil_div(g.size(i), kWideBlock);
  }
}

Status quantize_blockwise_groups(const QuantizeArgs& all, const Bounds& groups) {
  const Status status = check_blockwise_out(all.to);
  if (status != Status::ok) return status;
  // What belongs to groups has blocks of one row.
  if (all.to.scaling.block_rows != 1) return Status::unsupported;
  if (all.to.col.codes != nullptr && all.to.col.layout == Layout::k_last)
    return Status::unsupported;
  const int64_t elements = all.x.rows * all.x.cols;
  const int threads = elements < kSerialElements ? 1 : all.execution.threads;
  advise_huge_pages(all.to.row.codes, elements);
  advise_huge_pages(all.to.col.codes, elements);
  zero_unused(all, groups);
  FirstError error;
  parallel_tasks(threads, groups.count, threads, [&](int64_t i, int) {
    QuantizeArgs group = group_of(all, groups, i);
    group.execution.threads = threads;
    error.add(quantize_blockwise(group));
  });
  return error.get();
}

// Bytes of codes that lie one after another; 0 when they do not.
int64_t stacked_bytes(const QuantizeArgs* args, int64_t count, OperandOut QuantizeOut::* side) {
  const bool packs = is_fp4(args[0].to.element) && side == &QuantizeOut::row;
  const int64_t each = args[0].x.rows * (packs ? (args[0].x.cols + 1) / 2 : args[0].x.cols);
  for (int64_t i = 0; i < count; ++i) {
    if ((args[i].to.*side).codes != (args[0].to.*side).codes + i * each) return 0;
  }
  return count * each;
}

int64_t code_directions(const QuantizeOut& to) {
  return (to.row.codes != nullptr) + (to.col.codes != nullptr);
}

}  // namespace

Status quantize_many(const QuantizeArgs* args, int64_t count, int threads) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool blockwise = is_blockwise(args[i].to.scaling);
    const Status status = blockwise ? check_blockwise_out(args[i].to) : check_out(args[i].to);
    if (status != Status::ok) return status;
    total += args[i].x.rows * args[i].x.cols;
  }
  for (const auto side : {&QuantizeOut::row, &QuantizeOut::col}) {
    if (count > 0 && (args[0].to.*side).codes != nullptr)
      advise_huge_pages((args[0].to.*side).codes, stacked_bytes(args, count, side));
  }
  if (total < kSerialElements) threads = 1;
  const int64_t directions = count > 0 ? code_directions(args[0].to) : 0;
  FirstError error;
  parallel_tasks(threads, count, threads, [&](int64_t i, int) {
    if (is_blockwise(args[i].to.scaling)) {
      QuantizeArgs matrix = args[i];
      matrix.execution.threads = threads;
      return error.add(quantize_blockwise(matrix));
    }
    QuantizeTask a = task_of(args[i]);
    a.threads = threads;
    a.together = total * directions;
    error.add(quantize_task(a));
  });
  return error.get();
}

Status quantize_grouped(const GroupedQuantizeArgs& args) {
  const Matrix& x = args.all.x;
  if (x.rows < 0 || x.cols < 0) return Status::bad_argument;
  Status status = check_groups(args.groups, x.rows);
  if (status == Status::ok && is_blockwise(args.all.to.scaling))
    return quantize_blockwise_groups(args.all, Bounds(args.groups));
  if (status == Status::ok) status = check_out(args.all.to);
  if (status != Status::ok) return status;
  const QuantizeTask a = task_of(args.all);
  if (a.col_codes != nullptr && a.col_transposed) return Status::unsupported;
  const Bounds groups(args.groups);
  const int threads = a.rows * a.cols < kSerialElements ? 1 : a.threads;
  advise_huge_pages(a.row_codes, a.rows * a.cols);
  advise_huge_pages(a.col_codes, a.rows * a.cols);
  zero_unused(a, groups);
  FirstError error;
  parallel_tasks(threads, groups.count, threads, [&](int64_t i, int) {
    QuantizeTask group = group_of(a, groups, i);
    group.threads = threads;
    group.together = a.rows * a.cols * code_directions(args.all.to);
    error.add(quantize_task(group));
  });
  return error.get();
}

}  // namespace te_mx::cpu
