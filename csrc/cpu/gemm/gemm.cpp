// A GEMM: argument checks, packing, the choice of kernel, and bias gradients.
#include <cmath>
#include <cstring>

#include "common/isa.h"
#include "common/parallel.h"
#include "common/task_team.h"
#include "common/transpose.h"
#include "gemm/gemm_internal.hpp"
#include "gemm/gemm_plan.hpp"

namespace te_mx::cpu {

const KernelImpl* kernel_impl(Kernel kernel) {
  [[maybe_unused]] const bool emulated = isa_current() == Isa::amx_emulated;
  switch (kernel) {
    case Kernel::wide_f64:
      return wide_f64_impl();
    case Kernel::portable_f32:
      return portable_f32_impl();
    case Kernel::portable_stream:
      return portable_stream_impl();
#if defined(TE_MX_HAVE_AVX2)
    case Kernel::avx2_f32:
      return avx2_f32_impl();
    case Kernel::avx2_stream:
      return avx2_stream_impl();
#endif
#if defined(TE_MX_HAVE_AVX512)
    case Kernel::avx512_f32:
      return avx512_f32_impl();
    case Kernel::avx512_stream:
      return avx512_stream_impl();
#endif
#if defined(TE_MX_HAVE_AVX512_BF16)
    case Kernel::avx512_bf16:
      return avx512_bf16_impl();
    case Kernel::avx512_bf16_stream:
      return avx512_bf16_stream_impl();
#endif
    case Kernel::amx_bf16:
#if defined(TE_MX_HAVE_AMX)
      if (!emulated) return amx_bf16_impl();
#endif
      return amx_emulated_impl();
    case Kernel::amx_stream:
#if defined(TE_MX_HAVE_AMX)
      if (!emulated) return amx_stream_impl();
#endif
      return amx_emulated_stream_impl();
    default:
      return nullptr;
  }
}

namespace {

const KernelImpl* usable_impl(Kernel kernel) {
  return kernel_available(kernel) ? kernel_impl(kernel) : nullptr;
}

bool operand_ok(const StridedOperand& o) {
  if (o.rows < 0 || o.k < 0) return false;
  if (o.rows == 0 || o.k == 0) return true;
  if (o.as_values()) return o.values.col_stride == 1 && o.packed == nullptr;
  if (o.codes == nullptr || (o.scales == nullptr && o.stored == nullptr)) return false;
  return o.code_row_stride == 1 || o.code_k_stride == 1;
}

const PackedHeader* header_of(const StridedOperand& o) {
  return static_cast<const PackedHeader*>(o.packed);
}

// What a packed form says of the format.
int16_t element_word(const StridedOperand& o) {
  return static_cast<int16_t>(static_cast<int>(o.element) + (o.e4m3 ? kElements : 0));
}

bool packed_ok(const StridedOperand& o, Kernel kernel, Role role) {
  if (o.packed == nullptr) return true;
  const PackedHeader& h = *header_of(o);
  return h.rows == o.rows && h.k == o.k && h.kernel == static_cast<int32_t>(kernel) &&
         h.role == static_cast<int32_t>(role) && h.element == element_word(o) &&
         (h.split_offset != 0) == o.blockwise();
}

const void* at(const void* base, int64_t offset) { return static_cast<const char*>(base) + offset; }
void* at(void* base, int64_t offset) { return static_cast<char*>(base) + offset; }

StridedOperand rows_of(const StridedOperand& o, int64_t begin, int64_t end) {
  StridedOperand part = part_of_rows(o, begin, end);
  if (o.factors != nullptr) part.factors += begin;
  return part;
}

// One operand's exponents and panels, packed ahead or here.
struct Side {
  const StridedOperand& operand;
  Role role;
  const float* exponents;
  const uint8_t* wide_blocks;
  const void* panels;
  bool wide;

  Side(const StridedOperand& o, Role r, void* exponent_buffer, void* wide_buffer,
       void* panel_buffer, int threads)
      : operand(o), role(r), panels(panel_buffer) {
    if (o.packed != nullptr) {
      const PackedHeader& h = *header_of(o);
      exponents = static_cast<const float*>(at(o.packed, h.exponents_offset));
      wide_blocks = static_cast<const uint8_t*>(at(o.packed, h.wide_offset));
      panels = at(o.packed, h.panels_offset);
      wide = h.wide != 0;
    } else {
      float* buffer = static_cast<float*>(exponent_buffer);
      uint8_t* flags = static_cast<uint8_t*>(wide_buffer);
      wide = scan_row_exponents(o, buffer, flags, threads);
      exponents = buffer;
      wide_blocks = flags;
    }
  }

  Status pack(const KernelImpl& impl, int64_t begin, int64_t end, int threads) const {
    if (operand.packed != nullptr || panels == nullptr ||
        impl.panel_bytes(role, operand.rows, operand.k) == 0) {
      return Status::ok;
    }
    const auto pack_panels = impl.pack_read != nullptr ? impl.pack_read : impl.pack_panels;
    return pack_panels(role, rows_of(operand, begin, end), exponents + begin,
                       const_cast<void*>(panels), threads);
  }

  // The panels of the rows from `rows` on; null where the kernel decodes them.
  const void* panels_from(const KernelImpl& impl, int64_t rows) const {
    return panels == nullptr ? nullptr : at(panels, impl.panel_bytes(role, rows, operand.k));
  }
};

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body(first row, end, wide) for the longest runs of 32-row blocks of [begin, end) that are
// all wide or all not. begin is a multiple of 32.
template <class Body>
Status for_runs(const Side& side, int64_t begin, int64_t end, const Body& body) {
  while (begin < end) {
    const bool wide = side.wide && side.wide_blocks[begin / kRowBlock] != 0;
    int64_t next = begin + kRowBlock;
    while (next < end && (side.wide && side.wide_blocks[next / kRowBlock] != 0) == wide) {
      next += kRowBlock;
    }
    const Status status = body(begin, least(next, end), wide);
    if (status != Status::ok) return status;
    begin = next;
  }
  return Status::ok;
}

// One packed chunk: the family where all rows fit their exponent, wide_f64 elsewhere.
Status run_chunk(const Range& chunk, const KernelImpl& impl, const Side& lhs, const Side& rhs,
                 const EpilogueContext& context, void* scratch) {
  if (!lhs.wide && !rhs.wide) return impl.run(chunk, lhs.panels, rhs.panels, context, scratch);
  const KernelImpl& wide = *wide_f64_impl();
  return for_runs(lhs, chunk.m0, chunk.m1, [&](int64_t m0, int64_t m1, bool lhs_wide) {
    if (lhs_wide) {
      return wide.run({m0, m1, chunk.n0, chunk.n1}, nullptr, nullptr, context, nullptr);
    }
    return for_runs(rhs, chunk.n0, chunk.n1, [&](int64_t n0, int64_t n1, bool rhs_wide) {
      const Range range{m0, m1, n0, n1};
      if (rhs_wide) return wide.run(range, nullptr, nullptr, context, nullptr);
      return impl.run(range, lhs.panels_from(impl, m0 - chunk.m0),
                      rhs.panels_from(impl, n0 - chunk.n0), context, scratch);
    });
  });
}

// The bias gradient of kind operand for one packed chunk.
Status sum_rows(int64_t begin, int64_t end, const GemmTask& args, const KernelImpl& impl,
                const Side& lhs) {
  return for_runs(lhs, begin, end, [&](int64_t m0, int64_t m1, bool wide) {
    const bool plain = args.lhs.factors == nullptr && !args.lhs.e4m3;
    const KernelImpl& sums = wide || !plain ? *wide_f64_impl() : impl;
    const int64_t offset = m0 == begin ? 0 : impl.panel_bytes(Role::lhs, m0 - begin, args.lhs.k);
    sums.row_sums(rows_of(args.lhs, m0, m1), at(lhs.panels, offset), lhs.exponents + m0,
                  args.bias_grad + m0, args.threads);
    return Status::ok;
  });
}

Status run_chunks(const GemmTask& args, const KernelImpl& impl, const GemmPlan& plan,
                  const Side& lhs, const Side& rhs, const EpilogueContext& context) {
  const int64_t m = args.lhs.rows, n = args.rhs.rows;
  for (int64_t m0 = 0; m0 < m; m0 += plan.m_chunk) {
    const int64_t m1 = least(m0 + plan.m_chunk, m);
    Status status = lhs.pack(impl, m0, m1, args.threads);
    if (status != Status::ok) return status;
    if (args.bias_grad_kind == BiasGrad::operand) {
      status = sum_rows(m0, m1, args, impl, lhs);
      if (status != Status::ok) return status;
    }
    for (int64_t n0 = 0; n0 < n; n0 += plan.n_chunk) {
      const int64_t n1 = least(n0 + plan.n_chunk, n);
      status = rhs.pack(impl, n0, n1, args.threads);
      if (status != Status::ok) return status;
      const bool sums = args.bias_grad_kind == BiasGrad::result;
      if (m1 == m && n1 == n && !lhs.wide && !rhs.wide && !sums) last_step();
      status =
          run_chunk({m0, m1, n0, n1}, impl, lhs, rhs, context, at(args.workspace, plan.scratch));
      if (status != Status::ok) return status;
    }
  }
  return Status::ok;
}

// The plain double kernel takes the operands as they are.
Status run_wide(GemmTask& args, EpilogueContext context) {
  const KernelImpl* wide = wide_f64_impl();
  if (wide == nullptr || args.lhs.codes == nullptr || args.rhs.codes == nullptr) {
    return Status::unsupported;
  }
  args.ran = Kernel::wide_f64;
  context.lhs_exp = context.rhs_exp = context.lhs_factor = context.rhs_factor = nullptr;
  context.exact_scale = true;
  if (args.bias_grad_kind == BiasGrad::operand) {
    wide->row_sums(args.lhs, nullptr, nullptr, args.bias_grad, args.threads);
  }
  return wide->run({0, args.lhs.rows, 0, args.rhs.rows}, nullptr, nullptr, context, nullptr);
}

// K = 0: the epilogue of zeros.
void run_empty_sum(const GemmTask& args, const EpilogueContext& context) {
  const EpilogueFn epilogue = epilogue_for(isa_current());
  const int64_t m = args.lhs.rows, n = args.rhs.rows;
  alignas(64) static constexpr float kZeros[kRowBlock * 64] = {};
  parallel_for(args.threads, ceil_div(m, kRowBlock), [&](int64_t item) {
    const int64_t m0 = item * kRowBlock;
    for (int64_t n0 = 0; n0 < n; n0 += 64) {
      epilogue(context, kZeros, 64, m0, n0, static_cast<int>(least(kRowBlock, m - m0)),
               static_cast<int>(least(64, n - n0)));
    }
  });
}

// out[n] = sum of the partials of the 32-row blocks, in block order.
void reduce_partials(const float* partials, int64_t blocks, int64_t n, float* out, int threads) {
  constexpr int64_t kColumns = 1024;
  parallel_for(threads, ceil_div(n, kColumns), [&](int64_t item) {
    const int64_t begin = item * kColumns, end = least(begin + kColumns, n);
    for (int64_t i = begin; i < end; ++i) out[i] = 0.0f;
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t i = begin; i < end; ++i) out[i] += partials[b * n + i];
    }
  });
}

Status check(const GemmTask& a) {
  if (!operand_ok(a.lhs) || !operand_ok(a.rhs) || a.lhs.k != a.rhs.k) return Status::bad_argument;
  if (a.lhs.as_values()) {
    const bool plain = a.gelu == Gelu::none && a.aux == nullptr && a.gelu_in == nullptr;
    if (!plain || a.bias_grad_kind != BiasGrad::none) return Status::bad_argument;
  }
  if (!packed_ok(a.lhs, a.kernel, Role::lhs) || !packed_ok(a.rhs, a.kernel, Role::rhs)) {
    return Status::bad_argument;
  }
  const bool empty = a.lhs.rows == 0 || a.rhs.rows == 0;
  if (!empty && (a.out == nullptr || a.ldo < a.rhs.rows)) return Status::bad_argument;
  const int64_t sums = a.bias_grad_kind == BiasGrad::none      ? 0
                       : a.bias_grad_kind == BiasGrad::operand ? a.lhs.rows
                                                               : a.rhs.rows;
  if (sums > 0 && a.bias_grad == nullptr) return Status::bad_argument;
  if (a.gelu_in != nullptr && a.gelu == Gelu::none) return Status::bad_argument;
  const int64_t most = a.lhs.as_values() ? kValuesMaxRows : kStreamMaxRows;
  if (is_stream(a.kernel) && a.lhs.rows > most) return Status::unsupported;
  return Status::ok;
}

}  // namespace

static int64_t wide_bytes(int64_t rows) { return round_up(ceil_div(rows, kRowBlock), 64); }

int64_t packed_bytes(Kernel kernel, Role role, int64_t rows, int64_t k, bool blockwise) {
  const KernelImpl* impl = usable_impl(kernel);
  if (impl == nullptr || rows <= 0 || k <= 0) return 0;
  const int64_t panels = impl->panel_bytes(role, rows, k);
  if (panels == 0) return 0;
  return static_cast<int64_t>(sizeof(PackedHeader)) + round_up(rows, kRowBlock) * 4 +
         wide_bytes(rows) + panels + (blockwise ? SplitScales(rows, k).all : 0);
}

Status pack_operand(Kernel kernel, Role role, const StridedOperand& stored, void* packed,
                    int threads) {
  const KernelImpl* impl = usable_impl(kernel);
  if (impl == nullptr) return Status::unsupported;
  if (!operand_ok(stored) || packed_bytes(kernel, role, stored.rows, stored.k, false) == 0) {
    return Status::bad_argument;
  }
  StridedOperand operand = stored;
  PackedHeader h{};
  h.rows = operand.rows;
  h.k = operand.k;
  h.kernel = static_cast<int32_t>(kernel);
  h.role = static_cast<int32_t>(role);
  h.element = element_word(operand);
  h.exponents_offset = sizeof(PackedHeader);
  h.wide_offset = h.exponents_offset + round_up(operand.rows, kRowBlock) * 4;
  h.panels_offset = h.wide_offset + wide_bytes(operand.rows);
  if (operand.blockwise()) {
    h.split_offset = h.panels_offset + impl->panel_bytes(role, operand.rows, operand.k);
    operand = split_scales(operand, at(packed, h.split_offset), threads);
    h.factors = operand.factors != nullptr ? 1 : 0;
  }
  float* exponents = static_cast<float*>(at(packed, h.exponents_offset));
  uint8_t* wide_blocks = static_cast<uint8_t*>(at(packed, h.wide_offset));
  std::memset(wide_blocks, 0, static_cast<size_t>(wide_bytes(operand.rows)));  // padding too
  h.wide = scan_row_exponents(operand, exponents, wide_blocks, threads) ? 1 : 0;
  std::memcpy(packed, &h, sizeof h);
  return impl->pack_panels(role, operand, exponents, at(packed, h.panels_offset), threads);
}

namespace {

// Bytes of the scales that run_task() splits.
int64_t split_bytes(const StridedOperand& o) {
  return o.blockwise() && o.packed == nullptr ? SplitScales(o.rows, o.k).all : 0;
}

// To a kernel that reads factors, and elements without a negative zero, where a stream kernel on
// bf16 was asked for: the stream kernel on fp32, or the panel kernel of its level. Neither reads
// what the other packed.
void to_factors(GemmTask& args) {
  if (args.kernel != Kernel::avx512_bf16_stream && args.kernel != Kernel::amx_stream) return;
  const bool panels = usable_impl(Kernel::avx512_stream) == nullptr;
  const bool amx = args.kernel == Kernel::amx_stream;
  args.kernel = !panels ? Kernel::avx512_stream : amx ? Kernel::amx_bf16 : Kernel::avx512_bf16;
  args.ran = args.kernel;
  args.lhs.packed = args.rhs.packed = nullptr;
}

}  // namespace

int64_t workspace_bytes(const GemmTask& given) {
  const KernelImpl* impl = usable_impl(given.kernel);
  if (impl == nullptr) return 0;
  int64_t bytes = plan_gemm(given, *impl).bytes;
  if (!given.lhs.blockwise() && !given.rhs.blockwise()) return bytes;
  // Whether there are factors depends on the scales.
  static constexpr float kFactor = 1.0f;
  GemmTask args = given;
  to_factors(args);
  args.lhs.factors = args.rhs.factors = &kFactor;
  const int64_t with_factors = plan_gemm(args, *usable_impl(args.kernel)).bytes;
  bytes = bytes > with_factors ? bytes : with_factors;
  return split_bytes(given.lhs) + split_bytes(given.rhs) + bytes;
}

namespace {

StridedOperand turn_rhs(const GemmTask& args, const GemmPlan& plan) {
  StridedOperand o = args.rhs;
  const int64_t blocks = ceil_div(o.k, o.e4m3 ? kSmallBlock : kBlock);
  uint8_t* codes = static_cast<uint8_t*>(at(args.workspace, plan.turned_codes));
  uint8_t* scales = static_cast<uint8_t*>(at(args.workspace, plan.turned_scales));
  transpose_bytes(o.codes, o.k, o.rows, codes, args.threads);
  const int64_t scale_rows = o.e4m3 ? ceil_div(o.rows, o.block_rows) : o.rows;
  transpose_bytes(o.scales, blocks, scale_rows, scales, args.threads);
  o.codes = codes;
  o.scales = scales;
  o.code_row_stride = o.k;
  o.scale_row_stride = blocks;
  o.code_k_stride = o.scale_block_stride = 1;
  if (o.e4m3) {
    const int64_t bytes = ceil_div(o.k, 2);
    uint8_t* packed = codes + o.rows * o.k;
    parallel_for(args.threads, o.rows, [&](int64_t row) {
      const uint8_t* from = codes + row * o.k;
      for (int64_t k = 0; k < o.k; k += 2) {
        packed[row * bytes + k / 2] =
            static_cast<uint8_t>(from[k] | (k + 1 < o.k ? from[k + 1] << 4 : 0));
      }
    });
    o.codes = packed;
    o.code_row_stride = bytes;
    o.nibbles = true;
  }
  return o;
}

bool every_block_wide(const Side& side) {
  const int64_t blocks = ceil_div(side.operand.rows, kRowBlock);
  for (int64_t b = 0; b < blocks; ++b) {
    if (side.wide_blocks[b] == 0) return false;
  }
  return true;
}

// Whether the panels of a family start anew at every 32nd row.
bool cuts_at_blocks(const KernelImpl& impl, Role role, int64_t k) {
  return impl.panel_bytes(role, 3 * kRowBlock, k) == 3 * impl.panel_bytes(role, kRowBlock, k);
}

bool reaches_overflow(const StridedOperand& o) {
  return o.as_values() || o.element == Element::e5m2 || o.element == Element::e5m2fnuz;
}

// Whether nothing is left for a fast kernel. Stream kernels do not cut their problem.
bool all_wide(const GemmTask& args, const KernelImpl& impl, const Side& lhs, const Side& rhs) {
  if (args.kernel == Kernel::wide_f64) return true;
  const bool e5m2 = reaches_overflow(args.lhs) && reaches_overflow(args.rhs);
  const bool factors = args.lhs.factors != nullptr || args.rhs.factors != nullptr;
  if (e5m2 && args.lhs.k >= (factors ? kOverflowK / 4 : kOverflowK)) return true;
  if (is_stream(args.kernel)) return lhs.wide || rhs.wide;
  if (rhs.wide && !cuts_at_blocks(impl, Role::rhs, args.rhs.k)) return true;
  if (lhs.wide && !cuts_at_blocks(impl, Role::lhs, args.lhs.k)) return true;
  return (lhs.wide && every_block_wide(lhs)) || (rhs.wide && every_block_wide(rhs));
}

// Whether rows of D or aux had better not pass through the caches: reading the lines first that
// they overwrite costs more than all else that is done to them.
bool past_caches(const GemmTask& args, const void* base, DType dtype, int64_t ld) {
  const int64_t element = dtype == DType::f32 ? 4 : 2;
  const int64_t bytes = args.lhs.rows * args.rhs.rows * element;
  return base != nullptr && (bytes >= kPastCaches || args.together >= kPastCaches) &&
         reinterpret_cast<uintptr_t>(base) % 64 == 0 && ld * element % 64 == 0;
}

// Rows that are too wide, once more, each by itself: those beside them keep their bits.
void run_wide_rows(const GemmTask& args, const Side& lhs, const EpilogueContext& context) {
  for (int64_t row = 0; row < args.lhs.rows; ++row) {
    if (lhs.wide_blocks[row / kRowBlock] == 0 || !row_is_wide(args.lhs, row)) continue;
    wide_f64_impl()->run({row, row + 1, 0, args.rhs.rows}, nullptr, nullptr, context, nullptr);
  }
}

Status run_gemm(GemmTask& args, const KernelImpl* impl, const GemmPlan& plan) {
  Status status = Status::ok;
  const int64_t m = args.lhs.rows, n = args.rhs.rows, k = args.lhs.k;
  const bool partials = args.bias_grad_kind == BiasGrad::result;
  EpilogueContext context{};
  context.args = &args;
  context.past_caches = past_caches(args, args.out, args.out_dtype, args.ldo);
  context.aux_past_caches = past_caches(args, args.aux, args.aux_dtype, n);
  if (partials) {
    context.bias_grad_partial = static_cast<float*>(at(args.workspace, plan.bias_grad_partial));
  }
  if (m > 0 && n > 0 && k > 0) {
    Side lhs(
        args.lhs, Role::lhs, at(args.workspace, plan.lhs_exp), at(args.workspace, plan.lhs_wide),
        plan.decodes == Decodes::lhs ? nullptr : at(args.workspace, plan.lhs_panels), args.threads);
    const Side rhs(
        args.rhs, Role::rhs, at(args.workspace, plan.rhs_exp), at(args.workspace, plan.rhs_wide),
        plan.decodes == Decodes::rhs ? nullptr : at(args.workspace, plan.rhs_panels), args.threads);
    context.lhs_exp = lhs.exponents;
    context.rhs_exp = rhs.exponents;
    if (args.lhs.e4m3 || args.rhs.e4m3) {
      float* lhs_factor = static_cast<float*>(at(args.workspace, plan.lhs_factor));
      float* rhs_factor = static_cast<float*>(at(args.workspace, plan.rhs_factor));
      row_factors(args.lhs, lhs_factor);
      row_factors(args.rhs, rhs_factor);
      context.lhs_factor = lhs_factor;
      context.rhs_factor = rhs_factor;
    }
    const bool alone = args.invariant && lhs.wide && args.lhs.codes != nullptr;
    if (alone) lhs.wide = false;
    if (all_wide(args, *impl, lhs, rhs)) {
      status = run_wide(args, context);
    } else {
      status = run_chunks(args, *impl, plan, lhs, rhs, context);
      if (alone) run_wide_rows(args, lhs, context);
    }
    if (status != Status::ok) return status;
  } else {
    if (args.bias_grad_kind == BiasGrad::operand && m > 0) {
      std::memset(args.bias_grad, 0, static_cast<size_t>(m) * 4);
      const KernelImpl* wide = wide_f64_impl();
      if (k > 0 && wide != nullptr)
        wide->row_sums(args.lhs, nullptr, nullptr, args.bias_grad, args.threads);
    }
    context.exact_scale = true;
    if (m > 0 && n > 0) run_empty_sum(args, context);
  }
  if (partials && n > 0) {
    reduce_partials(context.bias_grad_partial, ceil_div(m, kRowBlock), n, args.bias_grad,
                    args.threads);
  }
  return Status::ok;
}

}  // namespace

namespace {

Status run_split(GemmTask& args);

// Splits the scales of an operand into the front of the workspace, unless they were.
void split_side(StridedOperand& o, GemmTask& args) {
  if (!o.blockwise()) return;
  if (o.packed != nullptr) {
    const PackedHeader& h = *header_of(o);
    o = with_split(o, at(o.packed, h.split_offset), h.factors != 0 || args.invariant);
    return;
  }
  const int64_t bytes = split_bytes(o);
  o = split_scales(o, args.workspace, args.threads, args.invariant);
  args.workspace = at(args.workspace, bytes);
  args.workspace_bytes -= bytes;
}

}  // namespace

namespace {

// The steps of a checked task.
Status run_steps(GemmTask& given) {
  if (!given.lhs.blockwise() && !given.rhs.blockwise()) return run_split(given);
  if (workspace_bytes(given) > given.workspace_bytes) return Status::small_workspace;
  GemmTask args = given;
  split_side(args.lhs, args);
  split_side(args.rhs, args);
  const bool fnuz = is_fnuz(args.lhs.element) || is_fnuz(args.rhs.element);
  if (fnuz || args.lhs.factors != nullptr || args.rhs.factors != nullptr) to_factors(args);
  const Status status = run_split(args);
  given.ran = args.ran;
  return status;
}

}  // namespace

Status run_task(GemmTask& given) {
  given.ran = given.kernel;
  if (given.lhs.rows * given.rhs.rows * given.lhs.k < kSerialProducts) given.threads = 1;
  if (usable_impl(given.kernel) == nullptr) return Status::unsupported;
  Status status = check(given);
  if (status != Status::ok) return status;
  parallel_tasks(given.threads, 1, 1, [&](int64_t, int) { status = run_steps(given); });
  return status;
}

namespace {

// Sixteen rows of values at a time.
Status run_rows(GemmTask& args) {
  Status status = Status::ok;
  const Matrix& x = args.lhs.values;
  const int64_t x_bytes = x.row_stride * (x.dtype == DType::f32 ? 4 : 2);
  const int64_t out_bytes = args.ldo * (args.out_dtype == DType::f32 ? 4 : 2);
  for (int64_t row = 0; row < args.lhs.rows && status == Status::ok; row += kStreamMaxRows) {
    GemmTask part = args;
    part.lhs.rows = least(args.lhs.rows - row, kStreamMaxRows);
    part.lhs.values.data = at(x.data, row * x_bytes);
    part.out = at(args.out, row * out_bytes);
    status = run_split(part);
  }
  return status;
}

// A task whose scales are bytes and factors.
Status run_split(GemmTask& args) {
  if (args.lhs.as_values()) {
    if (!is_stream(args.kernel)) return Status::unsupported;
    if (args.lhs.rows > kStreamMaxRows && args.kernel != Kernel::avx512_bf16_stream) {
      return args.kernel == Kernel::amx_stream ? run_rows(args) : Status::unsupported;
    }
  }
  const KernelImpl* impl = usable_impl(args.kernel);
  const GemmPlan plan = plan_gemm(args, *impl);
  Status status = Status::ok;
  if (plan.bytes > args.workspace_bytes) return Status::small_workspace;
  const StridedOperand stored = args.rhs;
  const bool empty = stored.rows == 0 || stored.k == 0 || args.lhs.rows == 0;
  if (!empty && turns_rhs(args)) args.rhs = turn_rhs(args, plan);
  status = run_gemm(args, impl, plan);
  args.rhs = stored;
  return status;
}

}  // namespace

}  // namespace te_mx::cpu
