// The kernel that prepares rows of x for decode_kernel.
#include "decode/decode_launch.cuh"

namespace te_mx::sm90 {

Status launch_prepare(DecodeParams& p, const DecodeRows& rows, int64_t blocks, int kept,
                      bool halves, bool factors, void* workspace, void* stream) {
  p.in.made = static_cast<uint8_t*>(workspace);
  p.in.made_scales = p.in.made + blocks * p.quads * decode_input_bytes(kept, halves);
  const dim3 grid(static_cast<unsigned>(p.quads), static_cast<unsigned>(blocks),
                  static_cast<unsigned>(kept / kPrepareRows));
  const auto kernel = halves ? (factors ? &prepare_rows<true, true> : &prepare_rows<true, false>)
                             : (factors ? &prepare_rows<false, true> : &prepare_rows<false, false>);
  return launch_early(kernel, {grid, kPrepareThreads, stream}, p.in, rows, int64_t{p.k}, p.quads,
                      kept);
}

}  // namespace te_mx::sm90
