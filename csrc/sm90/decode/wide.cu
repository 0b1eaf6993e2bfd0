// The launch of align_rows and align_plain.
#include "decode/align_kernel.cuh"
#include "decode/wide_run.cuh"

namespace te_mx::sm90 {
namespace {

// Products of activations and gates whose values align_plain could have.
bool plain_products(const AlignedInput& x) {
  DecodeInput values = x.in;
  values.gate = nullptr;
  return !x.factors && values.plain(x.k);
}

}  // namespace

Status launch_align(const AlignedInput& x, int blocks, void* stream) {
  const bool grouped = x.rows_of.groups.count > 0;
  const int rows = grouped ? blocks * x.rows : x.m;
  const dim3 grid(x.quads, (rows + kAlignRows - 1) / kAlignRows);
  if (x.plain() || plain_products(x))
    return launch_early(align_plain, {grid, kAlignThreads / 2, stream, 0, 1}, x);
  return launch_early(align_rows, {grid, kAlignThreads, stream, 0, 1}, x);
}

Status launch_align_beside(AlignedInput& x, void* workspace, int blocks, void* stream) {
  x.made = static_cast<uint8_t*>(workspace);
  x.beside = reinterpret_cast<float*>(x.made + int64_t{blocks} * x.quads * x.rows * kDecodeQuad);
  return launch_align(x, blocks, stream);
}

}  // namespace te_mx::sm90
