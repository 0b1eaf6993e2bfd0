// The GEMM's entry points: from the arguments of every device to the tasks that kernels see.
#include "common/check.h"
#include "gemm/gemm_internal.hpp"

namespace te_mx::cpu {

GemmTask task_of(const GemmArgs& args) {
  GemmTask task{};
  static_cast<Epilogue&>(task) = args.epilogue;
  task.kernel = static_cast<Kernel>(args.execution.kernel);
  task.lhs = strided(args.lhs);
  task.rhs = strided(args.rhs);
  task.lhs.values = args.values;
  task.workspace = args.execution.workspace;
  task.workspace_bytes = args.execution.workspace_bytes;
  task.threads = args.execution.threads;
  task.invariant = args.execution.invariant;
  return task;
}

Status pack(const PackArgs& args) {
  const Status status = check_factor(args.operand);
  if (status != Status::ok) return status;
  return pack_operand(static_cast<Kernel>(args.execution.kernel), args.role, strided(args.operand),
                      args.out.codes, args.execution.threads);
}

int64_t workspace_bytes(const GemmArgs& args) { return workspace_bytes(task_of(args)); }

Status gemm(const GemmArgs& args, Kernel& ran) {
  GemmTask task = task_of(args);
  ran = task.kernel;
  Status status = args.values.data != nullptr ? Status::ok : check_factor(args.lhs);
  if (status == Status::ok) status = check_factor(args.rhs);
  if (status != Status::ok) return status;
  status = run_task(task);
  ran = task.ran;
  return status;
}

}  // namespace te_mx::cpu
