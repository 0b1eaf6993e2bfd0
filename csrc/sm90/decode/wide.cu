// The launches of wide_kernel.
#include "decode/align_kernel.cuh"
#include "decode/wide_run.cuh"

namespace te_mx::sm90 {
namespace {

template <class Math>
Status run(WideParams p, const DecodeTask& t) {
  return launch_wide<Math>(&wide_kernel<Math>, p, p, t, kDecodeQuad, kWideThreads);
}

}  // namespace

Status launch_align(const AlignedInput& x, int blocks, void* stream) {
  const bool grouped = x.rows_of.groups.count > 0;
  const int rows = grouped ? blocks * x.rows : x.m;
  const dim3 grid(x.quads, (rows + kAlignRows - 1) / kAlignRows);
  return launch_early(align_rows, {grid, kAlignThreads, stream, 0, 1}, x);
}

// NOTE: as many columns of the tensor cores as the rows need, with the same sums of each row.
Status run_wide(const DecodeTask& t, int spread, int sms) {
  const WideParams p = wide_params(t, spread, num_splits({SplitKind::wide, t.n, t.k, sms}));
  const int rows = wide_rows(p.x.m);
  if (wide_makes(p, p.x.m, kWideOwnQuads)) {
    const Status status = run<WideMath<8, true>>(p, t);
    if (status != Status::unsupported) return status;
  }
  return rows == 16   ? run<WideMath<16, false>>(p, t)
         : rows == 32 ? run<WideMath<32, false>>(p, t)
                      : run<WideMath<64, false>>(p, t);
}

}  // namespace te_mx::sm90
