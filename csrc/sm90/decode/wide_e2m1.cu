// The launches of wide_fp4_kernel.
#include "decode/wide_e2m1.cuh"
#include "decode/wide_run.cuh"

namespace te_mx::sm90 {
namespace {

template <class Math>
Status run(WideFp4Params p, const DecodeTask& t) {
  return launch_wide<Math>(&wide_fp4_kernel<Math>, p, p.wide, t, kDecodeQuad / 2, kFp4Threads);
}

}  // namespace

// NOTE: as many columns of the tensor cores as the rows need, with the same sums of each row.
Status run_wide_e2m1(const DecodeTask& t, int spread, int sms) {
  const int groups = t.rows.groups.count;
  WideFp4Params p;
  p.wide = wide_params(t, spread, num_splits({SplitKind::wide, t.n, t.k, sms, groups}));
  p.blocks = t.p.w_scales.blocks;
  const auto lie = [&](int bytes) {
    return p.blocks % bytes == 0 && reinterpret_cast<uintptr_t>(p.wide.words) % bytes == 0;
  };
  p.rows = lie(16) ? ScaleRows::vectors : lie(4) ? ScaleRows::words : ScaleRows::bytes;
  if (wide_makes(p.wide, decode_rows(t.rows.m, groups), kFp4OwnQuads)) {
    const Status status = run<WideFp4<8, true>>(p, t);
    if (status != Status::unsupported) return status;
  }
  const int rows = wide_rows(t.rows.m, groups);
  return rows == 16   ? run<WideFp4<16, false>>(p, t)
         : rows == 32 ? run<WideFp4<32, false>>(p, t)
                      : run<WideFp4<64, false>>(p, t);
}

}  // namespace te_mx::sm90
