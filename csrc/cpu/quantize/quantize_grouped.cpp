// Quantizing groups: one task a group, each the ordinary quantize() on a part of the matrix. The
// team of tasks lets small groups run side by side and shares the items of large ones.
#include <algorithm>
#include <initializer_list>

#include "common/check.h"
#include "common/fresh_memory.h"
#include "common/groups.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "common/task_team.h"
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

// The same of scales that are not E8M0: fp32 of blocks of 128, or E4M3 of 16.
bool is_mx_alone(const QuantizeArgs& a) {
  return !is_blockwise(a.to.scaling) && !is_nvfp4(a.to.scaling);
}
int64_t scale_bytes(const QuantizeArgs& a) { return is_nvfp4(a.to.scaling) ? 1 : sizeof(float); }

QuantizeArgs group_of(const QuantizeArgs& all, const Bounds& groups, int64_t i) {
  QuantizeArgs a = all;
  const int64_t start = groups.starts[i], cols = a.x.cols, block = a.to.scaling.block_k;
  const auto scales = [&](void* base, int64_t count) {
    return static_cast<void*>(offset(static_cast<char*>(base), count * scale_bytes(all)));
  };
  const auto whole = [&](OperandOut& out, int64_t row) {
    out.tensor_scale = offset(out.tensor_scale, out.tensor_scales == TensorScale::groups ? i : row);
    if (out.tensor_scales == TensorScale::groups) out.tensor_scales = TensorScale::all;
  };
  a.x.data = static_cast<const char*>(a.x.data) + start * a.x.row_stride * element_bytes(a.x.dtype);
  a.x.rows = groups.size(i);
  QuantizeOut& to = a.to;
  to.first += start;
  to.row.codes = offset(to.row.codes, start * quantize_tile::code_bytes(to.element, cols));
  to.row.scales = scales(to.row.scales, start * ceil_div(cols, block));
  to.col.codes = offset(to.col.codes, start * cols);
  to.col.scales = scales(to.col.scales, groups.first_block(i, block) * cols);
  to.col_sum = offset(static_cast<float*>(to.col_sum), i * cols);
  to.col_sum_ws = offset(to.col_sum_ws, (start / kColSumRows + i) * cols);
  whole(to.row, start);
  whole(to.col, 0);
  return a;
}

void zero_unused(const QuantizeArgs& a, const Bounds& g) {
  const int64_t rows = a.x.rows, cols = a.x.cols, block = a.to.scaling.block_k;
  for_gaps(g, rows, [&](int64_t begin, int64_t end) {
    zero_rows(a.to.row.codes, quantize_tile::code_bytes(a.to.element, cols), begin, end);
    zero_rows(a.to.row.scales, ceil_div(cols, block) * scale_bytes(a), begin, end);
    zero_rows(a.to.col.codes, cols, begin, end);
    if (a.to.row.tensor_scales == TensorScale::rows && a.to.row.tensor_scale != nullptr)
      std::fill(a.to.row.tensor_scale + begin, a.to.row.tensor_scale + end, 1.0f);
  });
  int64_t at = 0;
  for (int64_t i = 0; i <= g.count; ++i) {
    const int64_t next = i < g.count ? g.first_block(i, block) : rows / block + g.count;
    zero_rows(a.to.col.scales, cols * scale_bytes(a), at, next);
    if (i < g.count) at = next + ceil_div(g.size(i), block);
  }
}

Status quantize_matrices(const QuantizeArgs& all, const Bounds& groups) {
  const bool wide = is_blockwise(all.to.scaling);
  const Status status = wide ? check_blockwise_out(all.to) : check_places(all.to);
  if (status != Status::ok) return status;
  // What belongs to groups has blocks of one row.
  if (all.to.scaling.block_rows != 1) return Status::unsupported;
  if (all.to.col.codes != nullptr &&
      (all.to.col.layout == Layout::k_last || all.to.col.tensor_scales == TensorScale::rows))
    return Status::unsupported;
  const int64_t elements = all.x.rows * all.x.cols;
  const int threads = elements < kSerialElements ? 1 : all.execution.threads;
  advise_huge_pages(all.to.row.codes,
                    all.x.rows * quantize_tile::code_bytes(all.to.element, all.x.cols));
  advise_huge_pages(all.to.col.codes, elements);
  zero_unused(all, groups);
  FirstError error;
  parallel_tasks(threads, groups.count, threads, [&](int64_t i, int) {
    QuantizeArgs group = group_of(all, groups, i);
    group.execution.threads = threads;
    error.add(quantize(group));
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
    const QuantizeOut& to = args[i].to;
    const Status status = is_blockwise(to.scaling) ? check_blockwise_out(to)
                          : is_nvfp4(to.scaling)   ? check_places(to)
                                                   : check_out(to);
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
    if (!is_mx_alone(args[i])) {
      QuantizeArgs matrix = args[i];
      matrix.execution.threads = threads;
      return error.add(quantize(matrix));
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
  if (status == Status::ok && !is_mx_alone(args.all))
    return quantize_matrices(args.all, Bounds(args.groups));
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
