#include "gemm/gemm_plan.hpp"

namespace te_mx::cpu {
namespace {

// A chunk of rhs is packed, used by all rows of the lhs chunk while it is in cache, and
// overwritten. The lhs chunk is large, as every lhs chunk packs rhs anew.
constexpr int64_t kRhsChunkBytes = 8 << 20;
constexpr int64_t kLhsChunkBytes = 32 << 20;
constexpr int64_t kLeastChunk = 512;
constexpr int64_t kAlign = 64;

int64_t chunk_rows(const KernelImpl& impl, Role role, const StridedOperand& o, int64_t budget) {
  if (budget == 0 || o.packed != nullptr || impl.panel_bytes(role, o.rows, o.k) == 0) return o.rows;
  const int64_t fit = budget / impl.panel_bytes(role, kLeastChunk, o.k) * kLeastChunk;
  const int64_t most = fit > kLeastChunk ? fit : kLeastChunk;
  return o.rows < most ? o.rows : most;
}

int64_t scratch_bytes(const KernelImpl& impl, const GemmTask& args) {
  return impl.workspace_bytes == nullptr ? 0 : round_up(impl.workspace_bytes(args), kAlign);
}

}  // namespace

bool is_stream(Kernel kernel) {
  return kernel >= Kernel::portable_stream && kernel <= Kernel::amx_stream;
}

// A stream adds up lanes for every element of D, and panels are made once for all rows of lhs and
// padded to 32 columns: the longer k and the fewer columns, the better the stream. The numbers are
// crossovers of the kernels on one thread of Zen 5 (docs/notes/cpu.md), but for that of AMX. Rows
// do not count, so that a row of D has the same bits beside up to 15 others.
bool stream_pays(Kernel stream, int64_t m, int64_t n, int64_t k) {
  if (m > kStreamMaxRows) return false;
  switch (stream) {
    case Kernel::portable_stream:
      return n <= 16 || k > 16;
    case Kernel::avx2_stream:
      return n <= 32 || k > 32;
    case Kernel::avx512_stream:
      return n <= 16 || k > 32;
    case Kernel::avx512_bf16_stream:
      return n <= 16 || k > (n <= 32 ? 32 : 64);
    case Kernel::amx_stream:
      return n <= 16 || k > 64;
    default:
      return false;
  }
}

int64_t turned_code_bytes(const StridedOperand& o) {
  return o.rows * o.k + (o.e4m3 ? o.rows * ceil_div(o.k, 2) : 0);
}

bool turns_rhs(const GemmTask& args) {
  const StridedOperand& rhs = args.rhs;
  // NOTE: one row lies so either way, but by k it has a code a byte.
  const bool by_k = rhs.code_k_stride != 1 || (rhs.e4m3 && !rhs.nibbles);
  return is_stream(args.kernel) && (by_k || rhs.scale_block_stride != 1);
}

GemmPlan plan_gemm(const GemmTask& args, const KernelImpl& impl) {
  GemmPlan p{};
  const int64_t m = args.lhs.rows, n = args.rhs.rows, k = args.lhs.k;
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t offset = at;
    at += round_up(bytes, kAlign);
    return offset;
  };
  const bool partials = args.bias_grad_kind == BiasGrad::result;
  p.bias_grad_partial = take(partials ? ceil_div(m, kRowBlock) * n * 4 : 0);
  if (m == 0 || n == 0 || k == 0) {
    p.bytes = at;
    return p;
  }
  const bool turned = turns_rhs(args);
  p.turned_codes = take(turned ? turned_code_bytes(args.rhs) : 0);
  const int64_t block = args.rhs.e4m3 ? kSmallBlock : kBlock;
  p.turned_scales = take(turned ? n * ceil_div(k, block) : 0);
  p.lhs_exp = take(args.lhs.packed != nullptr ? 0 : round_up(m, kRowBlock) * 4);
  p.rhs_exp = take(args.rhs.packed != nullptr ? 0 : round_up(n, kRowBlock) * 4);
  p.lhs_wide = take(args.lhs.packed != nullptr ? 0 : ceil_div(m, kRowBlock));
  p.rhs_wide = take(args.rhs.packed != nullptr ? 0 : ceil_div(n, kRowBlock));
  const bool e4m3 = args.lhs.e4m3 || args.rhs.e4m3;
  p.lhs_factor = take(e4m3 ? round_up(m, kRowBlock) * 4 : 0);
  p.rhs_factor = take(e4m3 ? round_up(n, kRowBlock) * 4 : 0);
  const bool factors = args.lhs.factors != nullptr || args.rhs.factors != nullptr;
  p.decodes = impl.decodes == nullptr || factors || e4m3 ? Decodes::none : impl.decodes(args);
  const bool no_lhs = p.decodes == Decodes::lhs, no_rhs = p.decodes == Decodes::rhs;
  // Every chunk of one side decodes the other anew.
  const int64_t rhs_bytes = no_lhs ? kLhsChunkBytes : kRhsChunkBytes;
  p.m_chunk = chunk_rows(impl, Role::lhs, args.lhs, no_lhs ? 0 : kLhsChunkBytes);
  p.n_chunk = chunk_rows(impl, Role::rhs, args.rhs, no_rhs ? 0 : rhs_bytes);
  const bool packs_lhs = args.lhs.packed == nullptr && !no_lhs;
  const bool packs_rhs = args.rhs.packed == nullptr && !no_rhs;
  p.lhs_panels = take(packs_lhs ? impl.panel_bytes(Role::lhs, p.m_chunk, k) : 0);
  p.rhs_panels = take(packs_rhs ? impl.panel_bytes(Role::rhs, p.n_chunk, k) : 0);
  p.scratch = take(scratch_bytes(impl, args));
  p.bytes = at;
  return p;
}

}  // namespace te_mx::cpu
