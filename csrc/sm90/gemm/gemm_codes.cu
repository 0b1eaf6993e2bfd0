// The entry point of the GEMM that reads codes of 4 bits: argument checks, launch, and the
// reduction of bias-gradient partials.
#include <algorithm>

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
  const int64_t bytes = (a.lhs.rows + kFinishRows - 1) / kFinishRows * a.rhs.rows * 4;
  return (bytes + 255) / 256 * 256;
}

// Where lhs becomes tiles, behind the partial sums of the bias gradient.
OperandOffsets lhs_offsets(const GemmArgs& a) {
  return operand_offsets(partial_bytes(a), a.lhs.rows, a.lhs.k);
}

}  // namespace

int64_t codes_workspace_bytes(const GemmArgs& a) {
  return a.lhs.layout == Layout::k_last ? lhs_offsets(a).end : partial_bytes(a);
}

Status gemm_codes(const GemmArgs& args) {
  GemmArgs a = args;
  const int64_t m = a.lhs.rows, n = a.rhs.rows, k = a.lhs.k;
  const int parts = a.execution.parts;
  const bool unpacks = a.lhs.layout == Layout::k_last;
  Status status = check_sides(a, unpacks ? Layout::k_last : Layout::tiles, Layout::k_last);
  if (status == Status::ok) status = check_epilogue(a.epilogue, n);
  if (status != Status::ok) return status;
  if (!is_mx(a.lhs.scaling) || !is_fp4(a.rhs.element) || (unpacks && !is_fp4(a.lhs.element)))
    return Status::unsupported;
  if (m <= 0 || n <= 0 || k <= 0 || k != a.rhs.k || m > INT32_MAX - 256 || n > INT32_MAX - 256 ||
      k > INT32_MAX - 256 || a.execution.kernel >= 0 || parts < 0 || parts > kMostCodesParts ||
      parts > (k + 127) / 128) {
    return Status::bad_argument;
  }
  if (!copied(a.rhs) || !exchange_fits(std::max(parts, 1))) return Status::unsupported;
  if (a.execution.workspace_bytes < codes_workspace_bytes(a)) return Status::small_workspace;
  const Device device = current_device();
  if (device.sms == 0) return Status::unsupported;
  if (unpacks) {
    const OperandOffsets at = lhs_offsets(a);
    uint8_t* const room = static_cast<uint8_t*>(a.execution.workspace);
    PackArgs pack;
    pack.operand = a.lhs, pack.execution = a.execution;
    pack.out.codes = room + at.codes, pack.out.scales = room + at.scales;
    pack.out.layout = Layout::tiles;
    status = unpack(pack);
    if (status != Status::ok) return status;
    a.lhs.codes = pack.out.codes, a.lhs.scales = pack.out.scales, a.lhs.layout = Layout::tiles;
  }
  status = tile_element(a.lhs.element) == Element::e5m2 ? launch_codes_e5m2(a, unpacks, device)
                                                        : launch_codes_e4m3(a, unpacks, device);
  if (status != Status::ok || a.epilogue.bias_grad == nullptr) return status;
  return reduce_columns(static_cast<const float*>(a.execution.workspace), a.epilogue.bias_grad,
                        (m + kFinishRows - 1) / kFinishRows, n,
                        static_cast<cudaStream_t>(a.execution.stream));
}

}  // namespace te_mx::sm90
