// The entry point of the GEMM that reads codes of 4 bits: argument checks, launch, and the
// reduction of bias-gradient partials.
#include "common/formats.h"
#include "gemm/gemm_launch.h"
#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {

namespace {

// The copy engine reads rows of whole 16 bytes.
bool copied(const Operand& o) {
  return (o.k + 1) / 2 % 16 == 0 && reinterpret_cast<uintptr_t>(o.codes) % 16 == 0;
}

int64_t partial_bytes(const GemmArgs& a) {
  if (a.epilogue.bias_grad == nullptr) return 0;
  return (a.lhs.rows + kFinishRows - 1) / kFinishRows * a.rhs.rows * 4;
}

}  // namespace

int64_t codes_workspace_bytes(const GemmArgs& args) { return partial_bytes(args); }

Status gemm_codes(const GemmArgs& a) {
  const int64_t m = a.lhs.rows, n = a.rhs.rows, k = a.lhs.k;
  const int parts = a.execution.parts;
  const bool nibbles = a.lhs.layout == Layout::k_last;
  Status status = check_sides(a, nibbles ? Layout::k_last : Layout::tiles, Layout::k_last);
  if (status == Status::ok) status = check_epilogue(a.epilogue, n);
  if (status != Status::ok) return status;
  if (!is_mx(a.lhs.scaling) || !is_fp4(a.rhs.element) || (nibbles && !is_fp4(a.lhs.element)))
    return Status::unsupported;
  if (m <= 0 || n <= 0 || k <= 0 || k != a.rhs.k || m > INT32_MAX - 256 || n > INT32_MAX - 256 ||
      k > INT32_MAX - 256 || a.execution.kernel >= 0 || parts < 0 || parts > kMostCodesParts ||
      parts > (k + 127) / 128) {
    return Status::bad_argument;
  }
  if (!copied(a.rhs) || (nibbles && !copied(a.lhs))) return Status::unsupported;
  if (a.execution.workspace_bytes < partial_bytes(a)) return Status::small_workspace;
  const Device device = current_device();
  if (device.sms == 0) return Status::unsupported;
  status = nibbles                                        ? launch_codes_fp4(a, device)
           : tile_element(a.lhs.element) == Element::e5m2 ? launch_codes_e5m2(a, device)
                                                          : launch_codes_e4m3(a, device);
  if (status != Status::ok || a.epilogue.bias_grad == nullptr) return status;
  return reduce_columns(static_cast<const float*>(a.execution.workspace), a.epilogue.bias_grad,
                        (m + kFinishRows - 1) / kFinishRows, n,
                        static_cast<cudaStream_t>(a.execution.stream));
}

}  // namespace te_mx::sm90
