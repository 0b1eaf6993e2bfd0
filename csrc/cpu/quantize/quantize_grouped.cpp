// Quantizing groups: one task a group, each the ordinary quantize() on a part of the matrix. The
// team of tasks lets small groups run side by side and shares the items of large ones.
#include <initializer_list>

#include "common/check.h"
#include "common/fresh_memory.h"
#include "common/groups.h"
#include "common/parallel.h"
#include "common/task_team.h"
#include "quantize/quantize_task.h"
#include "te_mx/cpu.h"

namespace te_mx::cpu {
namespace {

constexpr int64_t kSerialElements = 64 * 1024;  // as for one group

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
T* offset(T* base, int64_t by) {
  return base == nullptr ? nullptr : base + by;
}

QuantizeTask group_of(const QuantizeTask& all, const Bounds& groups, int64_t i) {
  QuantizeTask a = all;
  const int64_t start = groups.starts[i], cols = a.cols;
  a.x = static_cast<const char*>(a.x) + start * a.row_stride * element_bytes(a.x_dtype);
  a.rows = groups.size(i);
  a.row_codes = offset(a.row_codes, start * cols);
  a.row_scales = offset(a.row_scales, start * ceil_div(cols, kBlock));
  a.col_codes = offset(a.col_codes, start * cols);
  a.col_scales = offset(a.col_scales, groups.first_block(i) * cols);
  a.col_sum = offset(a.col_sum, i * cols);
  a.col_sum_ws = offset(a.col_sum_ws, (start / kColSumRows + i) * cols);
  return a;
}

void zero_unused(const QuantizeTask& a, const Bounds& g) {
  for_gaps(g, a.rows, [&](int64_t begin, int64_t end) {
    zero_rows(a.row_codes, a.cols, begin, end);
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

// Bytes of codes that lie one after another; 0 when they do not.
int64_t stacked_bytes(const QuantizeArgs* args, int64_t count, OperandOut QuantizeOut::* side) {
  const int64_t each = args[0].x.rows * args[0].x.cols;
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
    const Status status = check_out(args[i].to);
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
