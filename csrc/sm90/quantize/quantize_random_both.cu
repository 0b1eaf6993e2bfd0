// Both directions of a bf16 matrix, or of groups of its rows, to MXFP4 from one read, rounded
// stochastically or to nearest even, the columns after a Hadamard transform or without one.
//
//   read; random words of all elements; scales of the rows, whose blocks lie in four lanes
//   two columns at a time: codes of the rows, four bits each; transformed in fp32, scales of the
//   columns, codes
//   classes; plain codes as they are, codes of E4M3 by tables, as the tile's scales want them
//
// A thread has 8 x 8 elements, as in the quantizer, and draws once for both directions.
#include "quantize/random_sides.cuh"

namespace te_mx::sm90 {

namespace {

constexpr tile::Fp8 kFmt = tile::Fp8::e2m1;
constexpr uint32_t kNanTable = 15;

// Which tables the codes of eight blocks in rows from r on of an operand take, two in a word.
__device__ __forceinline__ uint4 tables_of(const TileScales& s, const Shifts& shifts, int b, int r,
                                           bool nan) {
  const uint4 entries = *reinterpret_cast<const uint4*>(&s.blocks[b][r]);
  const uint4 targets = shifts.of_cols(r);
  const auto table = [&](uint32_t entry, uint32_t target) {
    uint32_t e = entry & 0x00FF00FFu;
    const uint32_t nans = nan ? __vcmpgeu2(e, 0x00FF00FFu) : 0;
    e &= ~nans;
    uint32_t u = tile::kFp4Headroom * 0x10001u;  // the code itself
    if (shifts.any) {
      u = __vminu2(target + (tile::kFp4Headroom - 1) * 0x10001u - e, tile::kFp4Spread * 0x10001u);
    }
    return u | (nans & kNanTable * 0x10001u);
  };
  return {table(entries.x, targets.x), table(entries.y, targets.y), table(entries.z, targets.z),
          table(entries.w, targets.w)};
}

// Writes so many bytes of a word.
template <class Word>
__device__ __forceinline__ void write_bytes(uint8_t* to, Word w, int count) {
  const uint64_t bytes = [&] {
    if constexpr (sizeof(Word) == 8) return w.x | static_cast<uint64_t>(w.y) << 32;
    if constexpr (sizeof(Word) == 4) return static_cast<uint64_t>(w);
  }();
#pragma unroll 1
  for (int j = 0; j < static_cast<int>(sizeof(Word)) && j < count; ++j)
    to[j] = static_cast<uint8_t>(bytes >> (8 * j));
}

// Writes plain codes, of(k) of row k of a thread, where they lie as x does, two a byte or one.
template <class Of>
__device__ __forceinline__ void write_plain(const CodesOut& out, const Tile& t, const Place& at,
                                            const Of& of) {
  const int half = out.nibbles ? 1 : 0;  // as a shift: of eight codes
  uint8_t* to = out.codes + (t.r0 + at.r) * out.ld + ((t.c0() + at.c) >> half);
  const int width = (t.last_col ? out.last_width : 128 >> half) - (at.c >> half);
  const int rows = width > 0 ? t.rows - at.r : 0;
  if (out.vectors) {
#pragma unroll
    for (int k = 0; k < 8; ++k, to += out.ld) {
      if (k < rows) *reinterpret_cast<decltype(of(k))*>(to) = of(k);
    }
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k, to += out.ld) {
      if (k < rows) write_bytes(to, of(k), width);
    }
  }
}

// Writes the plain codes of columns, transposed, two a byte: staged as words of eight rows, 16-byte
// chunks of 32 rows xored with (col / 8) % 8.
__device__ __forceinline__ void write_col_words(const uint8_t (&codes)[128][128],
                                                const CodesOut& out, const Tile& t) {
  const int chunk = threadIdx.x % 4;
  const int width = (t.last_row ? out.last_width : 64) - 16 * chunk;
#pragma unroll
  for (int c = threadIdx.x / 4; c < 128; c += 64) {
    if (c >= t.cols || width <= 0) break;
    const uint4 w = *reinterpret_cast<const uint4*>(&codes[c][16 * (chunk ^ c / 8 % 8)]);
    uint8_t* const to = out.codes + (t.c0() + c) * out.ld + t.k0() / 2 + 16 * chunk;
    if (out.vectors) {
      *reinterpret_cast<uint2*>(to) = make_uint2(w.x, w.y);
      if (width > 8) *reinterpret_cast<uint2*>(to + 8) = make_uint2(w.z, w.w);
    } else {
      write_bytes(to, make_uint2(w.x, w.y), width);
      write_bytes(to + 8, make_uint2(w.z, w.w), width - 8);
    }
  }
}

template <bool kRandom>
__global__ void __launch_bounds__(kQuantizeThreads, 3)
    both_kernel(const __grid_constant__ RandomParams all) {
  extern __shared__ __align__(16) uint8_t room[];
  RandomSmem& smem = *reinterpret_cast<RandomSmem*>(room);
  QuantizeSmem& s = smem.q;
  tile::let_dependents_start();
  tile::await_predecessors();
  const QuantizeParams& p = all.q;
  Tile t;
  if (!find_rows(t, p, all.groups)) return;
  const Place at;
  uint32_t all_x[8][4];
  load_patch<Bf16>(
      all_x, static_cast<const Bf16*>(p.a.x) + (t.r0 + at.r) * p.a.x_stride + t.c0() + at.c,
      p.a.x_stride, t.rows - at.r, t.cols - at.c, p.x_vectors, &s.codes[0][0] + 64 * threadIdx.x);
  if (threadIdx.x == 0) s.row.clear(), s.col.clear(), smem.tile = t;
  if (threadIdx.x < 16) {
    const tile::Fp4Table table(threadIdx.x);
    smem.tables[threadIdx.x] = threadIdx.x == kNanTable ? make_uint2(0x7F7F7F7Fu, 0x7F7F7F7Fu)
                                                        : make_uint2(table.low, table.high);
  }
  if constexpr (kRandom) {
    park_words(slot_of(smem), all.first + static_cast<uint32_t>(t.r0 + at.r), t.c0() + at.c,
               key_of(all.seed));
  }
  const bool sums = p.a.col_sum != nullptr;
  if (sums) sum_cols<Bf16>(s.sums, all_x, at);

  const bool clamps = p.a.rule != ScaleRule::rceil;  // a scale may be too small
  RowCodes<kRandom> rows(smem, all_x, at, p.a);
  ColumnCodes<kRandom> cols(p.a, at, clamps);
  const Transform transform(smem, all, t, at);
  uint16_t* const entry = &s.col.blocks[at.band][at.c + at.lane_r];
  if (!p.x_vectors) __syncthreads();  // the slots of load_patch() lie elsewhere
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      tile::st_shared_u32x4(slot_of(smem) + kHalf * half + kStep * (k / 2),
                            make_uint4(all_x[k][2 * half], all_x[k][2 * half + 1],
                                       all_x[k + 1][2 * half], all_x[k + 1][2 * half + 1]));
    }
  }
  __syncwarp();
  // The columns, of a usual warp with a transform of kSize (0: none), or with what else there is.
  const auto columns = [&]<int kSize>() {
    constexpr bool kUsual = kSize >= 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint32_t slot = slot_of(smem) + kHalf * half;
      uint32_t four[8], made[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float v[2][8];
        uint32_t x[8], words[8];
        // NOTE: both pairs are read twice, since registers do not hold one of them meanwhile.
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
          const uint4 two = tile::ld_shared_u32x4(slot + kStep * (k / 2));
          x[k] = j == 0 ? two.x : two.y, x[k + 1] = j == 0 ? two.z : two.w;
        }
        load_columns(v, x, transform.at_turn);
        if constexpr (kRandom) load_words(words, slot, j);
        if (kUsual || p.row.enabled) {
          rows.template add<kUsual>(four, x, v, j, words, clamps);
          if (j == 1) {
            tile::st_shared_u32x4(slot + kStep, make_uint4(four[0], four[1], four[2], four[3]));
            tile::st_shared_u32x4(slot + 2 * kStep, make_uint4(four[4], four[5], four[6], four[7]));
          }
          if (!kUsual && rows.far) load_columns(v, x, transform.at_turn);
        }
        if (kUsual || p.col.enabled) {
          transform.template run<kSize>(v);
          cols.template add<kUsual>(made[2 * j], made[2 * j + 1], v, j, slot, entry + 4 * half,
                                    p.a);
        }
      }
      tile::st_shared_u32x4(slot, make_uint4(made[0], made[1], made[2], made[3]));
    }
  };
  const bool usual = p.row.enabled && p.col.enabled && !clamps && !rows.far && transform.all_whole;
  if (usual && all.size == 32) {
    columns.template operator()<32>();
  } else if (usual && all.size == 16) {
    columns.template operator()<16>();
  } else if (usual && all.size == 0) {
    columns.template operator()<0>();
  } else {
    columns.template operator()<-1>();
  }
  // NOTE: made anew; registers hold no places through the loop.
  const Place place(static_cast<int>(tile::keep(threadIdx.x)));
  uint32_t row_codes[8], col_codes[8];
  load_eight(col_codes, slot_of(smem), kHalf);
  bool nan = false;
  if (p.row.enabled) {
    rows.finish(row_codes, smem, place);
    nan = rows.nan;
  }
  if (p.col.enabled) nan |= cols.finish(s.col, col_codes, place);
  nan = __syncthreads_or(nan);
  t = smem.tile;
  const TileClasses classes = finish_scales<kFmt, true>(p, s, t, sums);

  if (p.row.packed) {
    const Shifts shifts(s.row, classes.row_exponent, true, classes.row);
    const uint4 tables = tables_of(s.row, shifts, place.row_block, place.r, nan);
    RowWriter out(p.row, t, place);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      out.write(k, tile::Fp4Table(smem.tables[half_of(tables, k)]).eight(row_codes[k]));
  } else if (p.row.enabled) {
    write_plain(p.row, t, place, [&](int k) { return row_codes[k]; });
  }
  if (!p.col.enabled) return;
  if (p.a.col_lies_as_x) {
    // Bytes of two rows each, as rows of eight columns.
    const auto turn = [&](int c) {
      tile::transpose_bytes(col_codes[c], col_codes[c + 1], col_codes[c + 2], col_codes[c + 3]);
    };
    turn(0), turn(4);
    write_plain(p.col, t, place, [&](int k) {
      const uint32_t left = col_codes[k / 2] >> (4 * (k % 2)) & 0x0F0F0F0Fu;
      const uint32_t right = col_codes[k / 2 + 4] >> (4 * (k % 2)) & 0x0F0F0F0Fu;
      return make_uint2(left, right);
    });
    return;
  }
  const int swizzle = place.c / 8 % 8;
  if (p.col.packed) {
    const Shifts shifts(s.col, classes.col_exponent, true, classes.col);
    const uint4 tables = tables_of(s.col, shifts, place.band, place.c, nan);
    uint8_t* const to = &s.codes[place.c][16 * (place.r / 16 ^ swizzle) + place.r % 16];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      *reinterpret_cast<uint2*>(to + 128 * c) =
          tile::Fp4Table(smem.tables[half_of(tables, c)]).eight(col_codes[c]);
    }
    __syncthreads();
    write_cols<false>(s.codes, p.col, t);
  } else {
    uint8_t* const to = &s.codes[place.c][16 * (place.band ^ swizzle) + 4 * place.lane_r];
#pragma unroll
    for (int c = 0; c < 8; ++c) *reinterpret_cast<uint32_t*>(to + 128 * c) = col_codes[c];
    __syncthreads();
    write_col_words(s.codes, p.col, t);
  }
}

}  // namespace

Status quantize_both_randomly(const RandomParams& p, cudaStream_t stream) {
  const bool random = p.seed != nullptr;
  const auto kernel = random ? both_kernel<true> : both_kernel<false>;
  constexpr int kBytes = sizeof(RandomSmem), kDrawn = sizeof(RandomSmem::words);
  const int smem = random ? kBytes : kBytes - kDrawn;
  const Status status =
      started(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  if (status != Status::ok) return status;
  return launch_early(kernel, {tile_grid(p.q, p.q.col_tiles), kQuantizeThreads, stream, smem}, p);
}

}  // namespace te_mx::sm90
