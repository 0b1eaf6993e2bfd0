// Few rows times weights that stand still: checks, and the instance.
#include "decode/decode_run.cuh"

#include "common/formats.h"
#include "te_mx/sm90_layout.h"

namespace te_mx::sm90 {
namespace {

DecodeCodes codes_of(const DecodeArgs& a) {
  const int64_t matrices = a.groups.count > 0 ? a.groups.count : 1;
  return {a.w, matrices * a.n, a.k, a.ldw};
}

WeightScales scales_of(const DecodeArgs& a) {
  WeightScales s;
  s.from = static_cast<const uint8_t*>(a.w_scales);
  const int64_t steps = decode_quads(a.k), tiles = packed_tiles(a.n);
  s.kind = a.factors ? ScaleKind::factors : a.w_packed ? ScaleKind::words : ScaleKind::bytes;
  if (!a.w_packed) {
    const int64_t blocks = (a.k + 31) / 32, rows = (a.n + a.factor_rows - 1) / a.factor_rows;
    const int64_t row_bytes = a.factors ? 4 * steps : blocks;
    s.quad = 4, s.matrix = rows * row_bytes, s.blocks = static_cast<int>(blocks);
    s.row = a.factor_rows == 1 ? row_bytes : 0, s.tile = kTile / a.factor_rows * row_bytes;
    if (!a.factors && (blocks % 4 != 0 || reinterpret_cast<uintptr_t>(s.from) % 4 != 0))
      s.kind = ScaleKind::odd_bytes;
    return s;
  }
  const int64_t words = a.factors ? kTile / a.factor_rows : kScaleWords;  // of a tile
  s.tile = 4 * words, s.row = a.factor_rows == 1 ? 4 : 0;
  s.quad = s.tile * (a.factor_rows == 1 ? tiles : block_tiles(a.n)), s.matrix = s.quad * steps;
  return s;
}

Status check(const DecodeArgs& a) {
  if (a.m < 1 || a.n < 1 || a.k < 1 || a.w == nullptr || a.x == nullptr || a.out == nullptr ||
      a.w_scales == nullptr)
    return Status::bad_argument;
  if (!known(a.x_dtype) || !known(a.out_dtype) || !known(a.bias_dtype)) return Status::bad_argument;
  if (!known(a.w_element) || !known(a.x_element) || !known(a.rule)) return Status::bad_argument;
  if (a.execution.kernel >= kDecodeSplits) return Status::bad_argument;
  if (a.spread < 0 || a.spread > kByRows) return Status::bad_argument;
  const int64_t most = (int64_t{1} << 31) - 257;
  if (a.m > most || a.n > most || a.k > most) return Status::unsupported;
  if (a.groups.count < 0 || a.groups.count > most || a.groups.capacity != 0)
    return Status::unsupported;
  if (a.groups.count > 0 && (a.groups.rows != a.m || !valid(a.groups))) return Status::bad_argument;
  if (decode_blocks(a.m, a.groups.count, 8) > 65535) return Status::unsupported;
  const bool values = a.x_scales == nullptr && !a.x_as_is;
  if (a.factor_rows != 1 && a.factor_rows != kTile) return Status::bad_argument;
  if (reinterpret_cast<uintptr_t>(a.w) % 16 != 0 || a.ldw % 16 != 0) return Status::unsupported;
  if (a.groups.count * a.n > most) return Status::unsupported;
  if (a.ldw < codes_of(a).row_bytes) return Status::bad_argument;
  if (a.factors) {
    if (a.w_element != Element::e4m3 || (values && !is_f32_rule(a.rule)))
      return Status::unsupported;
  } else {
    const Status status = check_mx(a.w_element, {});
    if (status != Status::ok) return status;
    if (!is_of_weights(a.w_element) || (is_fp4(a.w_element) && !a.w_packed) ||
        (values && is_f32_rule(a.rule)))
      return Status::unsupported;
  }
  if (a.activates && (a.act < Act{} || a.act > Act::gelu_erf)) return Status::bad_argument;
  if (a.activates && a.act == Act::clamped_silu) return Status::unsupported;
  if (a.x_as_is && (a.x_dtype == DType::f32 || a.x_scales != nullptr)) return Status::unsupported;
  if (a.gate != nullptr && (!values || a.x_dtype == DType::f32)) return Status::unsupported;
  return is_fp8(a.x_element) ? Status::ok : Status::unsupported;
}

bool vectors(const DecodeArgs& a) {
  const int64_t bytes = a.x_scales != nullptr ? 1 : a.x_dtype == DType::f32 ? 4 : 2;
  const int64_t step = a.x_scales != nullptr ? 8 : 16;
  const auto whole = [&](const void* from, int64_t ld) {
    return reinterpret_cast<uintptr_t>(from) % step == 0 && ld * bytes % step == 0;
  };
  return whole(a.x, a.ldx) && (a.gate == nullptr || whole(a.gate, a.ldgate));
}

}  // namespace

Status decode(const DecodeArgs& a) {
  const Status status = check(a);
  if (status != Status::ok) return status;
  const int sms = current_device().sms;
  if (sms == 0) return Status::unsupported;
  if (a.execution.workspace_bytes < decode_workspace(a.m, a.k, a.groups.count))
    return Status::small_workspace;
  DecodeTask t;
  t.split = decode_split(a.n, a.k, sms, a.groups.count > 0), t.n = a.n, t.k = a.k;
  t.workspace = a.execution.workspace, t.stream = a.execution.stream;
  t.rows.m = static_cast<int>(a.m);
  if (a.groups.count > 0) t.rows.groups = group_table(a.groups);
  if (a.execution.kernel >= 0) t.split = decode_split_of(a.execution.kernel, a.n, sms);
  if (t.split.cluster == 0) return Status::unsupported;
  t.w = codes_of(a), t.p.w_scales = scales_of(a);
  t.p.in = {a.x, a.ldx, a.x_scales, a.x_dtype, a.x_element == Element::e5m2, vectors(a), a.x_as_is};
  set_rule(t.p.in, a.rule, a.amax_epsilon);
  if (!set_gate(t.p.in, a.gate, a.ldgate, a.x_act)) return Status::unsupported;
  if (a.gate != nullptr && (!t.p.in.vectors || a.k % 8 != 0)) return Status::unsupported;
  t.p.out = {a.out, a.ldo, a.out_dtype, a.bias, a.bias_dtype, a.activates, a.act};
  const bool halves = a.halves();
  if (a.spread == kByRows) {
    const bool tiles = a.w_packed && a.w_element == Element::e4m3 && !halves;
    if (!tiles || (a.factors && a.factor_rows != kTile)) return Status::unsupported;
    return run_rows(t, a.factors, sms);
  }
  if (a.factors) {
    if (a.w_packed && !halves && a.groups.count == 0 && a.m > kFactorTilesFrom &&
        a.execution.kernel < 0) {
      const Status tiles = run_factor_tiles(t, a.factor_rows == 1, sms);
      if (tiles != Status::unsupported) return tiles;
    }
    return run_decode_factors_e4m3(t, halves);
  }
  if (a.w_packed && a.w_element == Element::e4m3 && !halves && a.groups.count == 0 &&
      a.execution.kernel < 0) {
    const Status tiles = run_tiles(t, a.spread, sms);
    if (tiles != Status::unsupported) return tiles;
  }
  return run_decode_e4m3(t, halves);
}

}  // namespace te_mx::sm90
