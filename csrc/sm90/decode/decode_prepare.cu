// The kernel that prepares rows of x for decode_kernel.
#include "decode/decode_launch.cuh"

namespace te_mx::sm90 {

namespace {

template <int kRows>
auto prepare_kernel(bool halves, bool factors) {
  if (halves) return factors ? &prepare_rows<kRows, true, true> : &prepare_rows<kRows, true, false>;
  return factors ? &prepare_rows<kRows, false, true> : &prepare_rows<kRows, false, false>;
}

}  // namespace

Status launch_prepare(DecodeParams& p, const DecodeRows& rows, int64_t blocks, int kept,
                      bool halves, bool factors, void* workspace, void* stream) {
  p.in.made = static_cast<uint8_t*>(workspace);
  p.in.made_scales = p.in.made + blocks * p.quads * decode_input_bytes(kept, halves);
  const dim3 grid(static_cast<unsigned>(p.quads), static_cast<unsigned>(blocks));
  const auto kernel = kept == 16   ? prepare_kernel<16>(halves, factors)
                      : kept == 32 ? prepare_kernel<32>(halves, factors)
                                   : prepare_kernel<kDecodeMostRows>(halves, factors);
  return launch_early(kernel, {grid, kPrepareThreads, stream}, p.in, rows, int64_t{p.k}, p.quads);
}

}  // namespace te_mx::sm90
