// GEMMs of groups: one task a group, each the ordinary pack() or gemm() on a part of the operands.
// The team of tasks lets small groups run side by side and shares the items of large ones.
#include <algorithm>
#include <atomic>

#include "common/check.h"
#include "common/fresh_memory.h"
#include "common/groups.h"
#include "common/parallel.h"
#include "common/task_team.h"
#include "gemm/gemm_internal.hpp"
#include "gemm/gemm_plan.hpp"

namespace te_mx::cpu {
namespace {

constexpr int64_t kScratchBytes = 256 << 20;  // bounds how many groups hold a workspace at a time

// Moves an operand's scales on by so many.
void skip_scales(StridedOperand& o, int64_t count) {
  if (o.blockwise()) {
    o.stored += count;
  } else {
    o.scales += count;
  }
}

// Operand i of several that lie one after another.
StridedOperand stacked(const StridedOperand& first, int64_t i, int64_t packed_stride) {
  StridedOperand o = first;
  o.codes += i * o.code_bytes();
  skip_scales(o, i * ceil_div(o.rows, o.block_rows) * ceil_div(o.k, o.block_k()));
  if (o.e4m3) o.whole += i * (o.whole_row_stride != 0 ? o.rows : 1);
  if (o.packed != nullptr) o.packed = static_cast<const char*>(o.packed) + i * packed_stride;
  return o;
}

// Rows [starts[i], ends[i]) of an operand whose rows are grouped.
StridedOperand grouped_rows(const StridedOperand& all, const Bounds& g, int64_t i) {
  StridedOperand o = all;
  o.codes += g.starts[i] * o.code_row_stride;
  skip_scales(o, g.starts[i] * o.scale_row_stride);
  o.whole += g.starts[i] * o.whole_row_stride + i * o.whole_group_stride;
  o.rows = g.size(i);
  return o;
}

// The part of k that belongs to group i.
StridedOperand grouped_k(const StridedOperand& all, const Bounds& g, int64_t i) {
  StridedOperand o = all;
  o.codes += g.starts[i] * o.code_k_stride;
  skip_scales(o, g.first_block(i, o.block_k()) * o.scale_block_stride);
  o.whole += i * o.whole_group_stride;
  o.k = g.size(i);
  return o;
}

// A call's groups as tasks.
struct GroupedTask {
  GemmTask all;
  Bounds groups;
  bool along_k;
  Kernel few_rows;
  int64_t packed_stride;

  explicit GroupedTask(const GroupedGemmArgs& args)
      : all(task_of(args.gemm)),
        groups(args.groups),
        along_k(args.along_k),
        few_rows(args.gemm.execution.few_rows_kernel < 0
                     ? all.kernel
                     : static_cast<Kernel>(args.gemm.execution.few_rows_kernel)),
        packed_stride(args.gemm.rhs.packed_stride) {}

  int64_t out_rows() const { return along_k ? groups.count * all.lhs.rows : all.lhs.rows; }
  int64_t row_bytes() const { return all.rhs.rows * element_bytes(all.out_dtype); }

  GemmTask group(int64_t i) const {
    GemmTask a = all;
    int64_t out_row = 0;
    if (along_k) {
      a.lhs = grouped_k(all.lhs, groups, i);
      a.rhs = grouped_k(all.rhs, groups, i);
      out_row = i * all.lhs.rows;
    } else if (all.lhs.as_values()) {
      Matrix& x = a.lhs.values;
      x.data = static_cast<const char*>(x.data) +
               groups.starts[i] * x.row_stride * element_bytes(x.dtype);
      a.lhs.rows = groups.size(i);
      a.rhs = stacked(all.rhs, i, packed_stride);
      out_row = groups.starts[i];
    } else {
      a.lhs = grouped_rows(all.lhs, groups, i);
      a.rhs = stacked(all.rhs, i, packed_stride);
      out_row = groups.starts[i];
    }
    const bool few = a.lhs.rows <= kStreamMaxRows;
    if (few && (!is_stream(few_rows) || stream_pays(few_rows, a.lhs.rows, a.rhs.rows, a.lhs.k))) {
      a.kernel = few_rows;
    }
    if (a.kernel != all.kernel) a.rhs.packed = nullptr;
    if (all.out != nullptr) a.out = static_cast<char*>(all.out) + out_row * row_bytes();
    if (all.bias != nullptr) {
      a.bias =
          static_cast<const char*>(all.bias) + i * all.rhs.rows * element_bytes(all.bias_dtype);
    }
    return a;
  }
};

// Rows of values that a stream takes at a time: each time it reads the codes of rhs.
int64_t most_rows(const GemmTask& a) {
  if (!a.lhs.as_values()) return a.lhs.rows;
  return a.kernel == Kernel::avx512_bf16_stream ? kValuesMaxRows : kStreamMaxRows;
}

Status run_group(GemmTask& group) {
  Status status = Status::ok;
  const Matrix& x = group.lhs.values;
  const int64_t most = most_rows(group);
  for (int64_t row = 0; row < group.lhs.rows && status == Status::ok; row += most) {
    GemmTask a = group;
    a.lhs.rows = std::min(most, group.lhs.rows - row);
    if (row > 0) {
      a.lhs.values.data =
          static_cast<const char*>(x.data) + row * x.row_stride * element_bytes(x.dtype);
      a.out = static_cast<char*>(group.out) + row * group.ldo * element_bytes(group.out_dtype);
    }
    status = run_task(a);
    group.ran = a.ran;
  }
  return status;
}

struct Schedule {
  int64_t group_bytes;  // workspace of one group
  int members;          // groups that run at a time
  int64_t products;     // of all groups
};

Schedule schedule(const GroupedTask& task) {
  Schedule s{0, 1, 0};
  for (int64_t i = 0; i < task.groups.count; ++i) {
    GemmTask a = task.group(i);
    s.products += a.lhs.rows * a.rhs.rows * a.lhs.k;
    a.lhs.rows = std::min(a.lhs.rows, most_rows(a));
    s.group_bytes = std::max(s.group_bytes, round_up(workspace_bytes(a), 64));
  }
  int64_t members = std::min<int64_t>(task.all.threads, task.groups.count);
  if (s.group_bytes > 0) members = std::min(members, kScratchBytes / s.group_bytes);
  s.members = static_cast<int>(std::max<int64_t>(members, 1));
  return s;
}

Status check(const GroupedGemmArgs& args) {
  const auto& [lhs, rhs, values, e, execution] = args.gemm;
  const bool as_values = values.data != nullptr;
  Status status = as_values ? Status::ok : check_factor(lhs);
  if (status == Status::ok) status = check_factor(rhs);
  if (status != Status::ok) return status;
  if (as_values && (args.along_k || !is_stream(static_cast<Kernel>(execution.kernel))))
    return Status::unsupported;
  // What belongs to groups has blocks of one row.
  if (lhs.scaling.block_rows != 1 || (args.along_k && rhs.scaling.block_rows != 1))
    return Status::unsupported;
  const bool packs_k = is_fp4(lhs.element) && lhs.layout == Layout::k_last;
  if (args.along_k && (packs_k || (is_fp4(rhs.element) && rhs.layout == Layout::k_last)))
    return Status::unsupported;
  if (e.gelu != Gelu::none || e.aux != nullptr || e.gelu_in != nullptr ||
      e.bias_grad_kind != BiasGrad::none || args.first_rows != nullptr) {
    return Status::unsupported;
  }
  if (lhs.rows < 0 || rhs.rows < 0 || lhs.k != rhs.k || lhs.packed != nullptr ||
      (args.along_k && rhs.packed != nullptr) || e.ldo != rhs.rows) {
    return Status::bad_argument;
  }
  return check_groups(args.groups, args.along_k ? lhs.k : lhs.rows);
}

}  // namespace

Status pack_many(const PackArgs& args) {
  const Status status = check_factor(args.operand);
  if (status != Status::ok) return status;
  const StridedOperand first = strided(args.operand);
  const Kernel kernel = static_cast<Kernel>(args.execution.kernel);
  const int threads = args.execution.threads;
  const int64_t bytes = packed_bytes(kernel, args.role, first.rows, first.k, first.blockwise());
  if (bytes == 0) return kernel_available(kernel) ? Status::bad_argument : Status::unsupported;
  if (args.groups.count < 0 || args.out_stride < bytes || args.out.codes == nullptr)
    return Status::bad_argument;
  advise_huge_pages(args.out.codes, args.groups.count * args.out_stride);
  FirstError error;
  parallel_tasks(threads, args.groups.count, threads, [&](int64_t i, int) {
    error.add(pack_operand(kernel, args.role, stacked(first, i, 0),
                           args.out.codes + i * args.out_stride, threads));
  });
  return error.get();
}

int64_t workspace_bytes_grouped(const GroupedGemmArgs& args) {
  if (check(args) != Status::ok) return 0;
  const Schedule s = schedule(GroupedTask(args));
  return s.group_bytes * s.members;
}

Status gemm_grouped(const GroupedGemmArgs& args, uint32_t& ran) {
  ran = 0;
  const Status status = check(args);
  if (status != Status::ok) return status;
  const GroupedTask task(args);
  const GemmTask& all = task.all;
  const Schedule s = schedule(task);
  if (s.group_bytes * s.members > all.workspace_bytes) return Status::small_workspace;
  const int64_t out_bytes = task.out_rows() * task.row_bytes();
  advise_huge_pages(all.out, out_bytes);
  if (!task.along_k && !all.accumulate) {
    for_gaps(task.groups, all.lhs.rows,
             [&](int64_t begin, int64_t end) { zero_rows(all.out, task.row_bytes(), begin, end); });
  }
  const int threads = s.products < kSerialProducts ? 1 : all.threads;
  FirstError error;
  std::atomic<uint32_t> kernels{0};
  parallel_tasks(threads, task.groups.count, s.members, [&](int64_t i, int member) {
    GemmTask a = task.group(i);
    if (a.lhs.rows == 0) return;
    // A group is cut for its share of the threads: finer cuts only read operands more often.
    const int64_t products = a.lhs.rows * a.rhs.rows * a.lhs.k;
    const int64_t share = s.products == 0 ? 0 : 2 * threads * products / s.products + 1;
    a.threads = static_cast<int>(std::clamp<int64_t>(share, std::min(threads, 2), threads));
    a.workspace = static_cast<char*>(all.workspace) + member * s.group_bytes;
    a.workspace_bytes = s.group_bytes;
    a.together = out_bytes;
    error.add(run_group(a));
    if (products > 0) kernels.fetch_or(1u << static_cast<int>(a.ran));
  });
  ran = kernels.load();
  return error.get();
}

}  // namespace te_mx::cpu
