// Both directions of a bf16 matrix, or of groups of its rows, to MXFP4 from one read, rounded
// stochastically or to nearest even, the columns after a Hadamard transform or without one.
//
//   read; random words of all elements meanwhile; scales of the rows, whose blocks lie in four
//   lanes codes of the rows, four bits each; two columns, one after the other: transformed in fp32,
//   scales of the columns, codes classes; plain codes as they are, codes of E4M3 by tables, as the
//   tile's scales want them
//
// A thread has 8 x 8 elements, as in the quantizer, and draws once for both directions.
#include "mxtile/sm90/copy_async.cuh"
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

// Where a warp finds an output of a whole tile (RandomParams::whole), which its lanes left.
__device__ __forceinline__ uint8_t* whole_at(const RandomSmem& s, uint32_t thread, int i) {
  const uint2 at = tile::ld_shared_u32x2(tile::smem_addr(&s.to[0][i]) + (thread & ~31u));
  return static_cast<uint8_t*>(__cvta_global_to_generic(at.x | static_cast<uint64_t>(at.y) << 32));
}
__device__ __forceinline__ void find_whole(RandomSmem& s, const RandomParams& all, const Tile& t) {
  const WholeOut& out = all.whole[threadIdx.x % 4];
  s.to[threadIdx.x / 32][threadIdx.x % 4] =
      out.first + static_cast<uint64_t>(out.by_row) * static_cast<uint32_t>(t.rt) +
      static_cast<uint64_t>(out.by_col) * static_cast<uint32_t>(t.ct);
}
// Writes codes of a thread, of(k) of its row k, from `to` on, in vectors.
template <class Of>
__device__ __forceinline__ void write_whole(uint8_t* to, uint32_t ld, const Of& of) {
#pragma unroll
  for (int k = 0; k < 8; ++k)
    *reinterpret_cast<decltype(of(k))*>(to + static_cast<uint64_t>(ld) * k) = of(k);
}

// Writes plain codes, of(k) of row k of a thread, where they lie as x does, two a byte or one.
template <class Of>
__device__ __forceinline__ void write_plain(const CodesOut& out, const Tile& t, const Place& at,
                                            const Of& of) {
  constexpr int half = sizeof(decltype(of(0))) == 4 ? 1 : 0;  // as a shift: of eight codes
  uint8_t* to = out.codes + (t.r0 + at.r) * out.ld + ((t.c0() + at.c) >> half);
  const int width = (t.last_col ? out.last_width : 128 >> half) - (at.c >> half);
  const int rows = width > 0 ? t.rows - at.r : 0;
  if (out.vectors && out.ld < INT32_MAX && rows >= 8 &&
      width >= static_cast<int>(sizeof(decltype(of(0))))) {
    const uint32_t ld = static_cast<uint32_t>(out.ld);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      *reinterpret_cast<decltype(of(k))*>(to + static_cast<uint64_t>(ld) * k) = of(k);
  } else if (out.vectors) {
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

// Starts copies of a thread's numbers to where they wait, as `to_even` says, of a whole tile with
// no questions; false for another. NOTE: past L1, which has little room beside this shared memory.
__device__ __forceinline__ bool copy_tile(QuantizeSmem& s, uint32_t to_even, const Bf16* from,
                                          const QuantizeParams& p, const Tile& t) {
  if (!p.x_vectors || t.rows < 128 || t.cols < 128 || p.a.x_stride > INT32_MAX / 2) return false;
  const uint32_t step = 2 * static_cast<uint32_t>(p.a.x_stride);  // NOTE: one product a row
  uint8_t* const codes = &s.codes[0][0];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    tile::copy16_async(codes + (Slots::row(to_even, k) - tile::smem_addr(codes)),
                       reinterpret_cast<const uint8_t*>(from) + static_cast<uint64_t>(step) * k,
                       true);
  }
  tile::end_copy_group();
  return true;
}

template <bool kRandom>
__global__ void __launch_bounds__(kQuantizeThreads, 3)
    both_kernel(const __grid_constant__ RandomParams all) {
  extern __shared__ __align__(128) uint8_t room[];
  RandomSmem& smem = *reinterpret_cast<RandomSmem*>(room);
  QuantizeSmem& s = smem.q;
  tile::let_dependents_start();
  tile::await_predecessors();
  const QuantizeParams& p = all.q;
  Tile t;
  if (!find_rows(t, p, all.groups)) return;
  const Place at(static_cast<int>(threadIdx.x % kQuantizeThreads));
  uint32_t all_x[8][4];
  const Bf16* const own =
      static_cast<const Bf16*>(p.a.x) + (t.r0 + at.r) * p.a.x_stride + t.c0() + at.c;
  const bool direct = kRandom && all.direct;
  if (direct) find_whole(smem, all, t);
  const Slots slots(smem, threadIdx.x % kQuantizeThreads);
  const uint32_t to_even = slots.to_even();
  const bool copied = copy_tile(s, to_even, own, p, t);
  if (threadIdx.x == 0) s.row.clear(), s.col.clear(), smem.tile = t;
  if (threadIdx.x < 16) {
    const tile::Fp4Table table(threadIdx.x);
    smem.tables[threadIdx.x] = threadIdx.x == kNanTable ? make_uint2(0x7F7F7F7Fu, 0x7F7F7F7Fu)
                                                        : make_uint2(table.low, table.high);
  }
  // NOTE: loops, not all rows and both columns at once: an SM keeps their code.
  if constexpr (kRandom) {
    const uint2 key = key_of(all.seed);
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      uint4 words[4];
      draw(words, all.first + static_cast<uint32_t>(t.r0 + at.r) + 4 * h, t.c0() + at.c, key);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        tile::st_shared_u32x4(Slots::row(to_even, k) + kWords + 512 * h, words[k]);
    }
  }
  if (copied) {
    tile::wait_copy_groups<0>();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint4 v = tile::ld_shared_u32x4(Slots::row(to_even, k));
      all_x[k][0] = v.x, all_x[k][1] = v.y, all_x[k][2] = v.z, all_x[k][3] = v.w;
    }
  } else {
    load_patch<Bf16>(all_x, own, p.a.x_stride, t.rows - at.r, t.cols - at.c, p.x_vectors,
                     &s.codes[0][0] + 64 * threadIdx.x);
  }
  const bool sums = p.a.col_sum != nullptr;
  if (sums) sum_cols<Bf16>(s.sums, all_x, at);

  RowCodes<kRandom> rows(smem, all_x, at, p.a, p.row.packed);
  __syncwarp();
  if (direct && p.row.enabled)
    rows.write_scales(whole_at(smem, threadIdx.x, 0), static_cast<uint32_t>(p.a.cols) / 32, at);
  if (!p.x_vectors) __syncthreads();  // the slots of load_patch() lie elsewhere
  uint32_t row_codes[8] = {};
  if (!copied) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const auto& x = all_x[k];
      tile::st_shared_u32x4(Slots::row(to_even, k), make_uint4(x[0], x[1], x[2], x[3]));
    }
  }
  const bool clamps = p.a.rule != ScaleRule::rceil;  // a scale may be too small
#pragma unroll 1
  for (int h = 0; p.row.enabled && h < 2; ++h) {
    uint4 words[4] = {};
    if constexpr (kRandom) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        words[k] = tile::ld_shared_u32x4(Slots::row(to_even, k) + kWords + 512 * h);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) row_codes[k] = row_codes[k + 4];
    const uint4 by4 = tile::ld_shared_u32x4(rows.at_by + 16 * h);
    const auto four = [&](auto prepare) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 w = tile::ld_shared_u32x4(Slots::row(to_even, k) + 512 * h);
        uint32_t x[4] = {w.x, w.y, w.z, w.w}, by = part(by4, k);
        prepare(k, x, by);
        row_codes[4 + k] = rows.codes_of(x, words[k], by);
      }
    };
    if (clamps || rows.far) {
      four([&](int k, uint32_t (&x)[4], uint32_t& by) {
        rows.prepare(x, by, s.row.blocks[at.row_block][at.r + 4 * h + k], clamps);
      });
    } else {
      four([](int, uint32_t (&)[4], uint32_t&) {});
    }
  }
  bool nan = false;
  if (p.row.enabled) {
    rows.finish(row_codes, smem, at);
    nan = rows.nan;
  }
  if (p.row.enabled && !p.row.packed) {
    const auto code = [&](int k) { return row_codes[k]; };
    const uint32_t ld = static_cast<uint32_t>(p.row.ld);
    if (direct) {
      write_whole(whole_at(smem, threadIdx.x, 1) + (ld * at.r + at.c / 2), ld, code);
    } else {
      write_plain(p.row, t, at, code);
    }
  }
  __syncwarp();
  uint32_t col_codes[8];
  if (p.col.enabled) {
    const ColumnCodes<kRandom> cols(t, at);
    const bool usual = cols.usual(t, all);
    uint32_t from = tile::keep(slots.from());
    uint32_t codes[2][4] = {}, e[2] = {};
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int g = 0; g < 4; ++g) codes[0][g] = codes[1][g];
      __syncwarp();  // or ptxas would read numbers before the loop, and have no registers for them
      e[0] = e[1];
      float v[32];
      cols.load(v, from, all);
      e[1] = kNotFinite;
      if (usual) {
        e[1] = cols.run_usual(codes[1], v, from);
        if (e[1] == kNotFinite) cols.load(v, from, all);
      }
      if (e[1] == kNotFinite) e[1] = cols.run(codes[1], v, from, all);
      from ^= 64;
    }
    const uint32_t thread = tile::keep(threadIdx.x) % kQuantizeThreads;  // made anew, as below
    const Slots back(smem, thread);
    const uint32_t warp = thread / 32, column = 64 * (warp % 2) + back.column(0);
    if (direct) {
      const uint32_t ld = static_cast<uint32_t>(p.a.cols);
      cols.write_scales(whole_at(smem, thread, 2) + (warp / 2 * ld + column), e);
    } else {
      const auto found = [](const uint32_t (&w)[4]) {
        return (w[0] | w[1] | w[2] | w[3]) & 0x77777777u;
      };
      const uint32_t any[2] = {found(codes[0]), found(codes[1])};
      nan |= cols.finish(s.col, any, e, column, warp / 2, p.col.packed);
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t to = back.codes_to(c);
#pragma unroll
      for (int g = 0; g < 4; ++g) tile::st_shared_u32(to + 256 * g, codes[c][g]);
    }
    __syncwarp();
    const uint32_t codes_at = back.codes_from();
    load_eight(col_codes, codes_at, (codes_at ^ 64) + 128);
  }
  // Bytes of two rows each, as rows of eight columns, of codes that lie as x does.
  const auto turn = [&] {
#pragma unroll
    for (int c = 0; c < 8; c += 4)
      tile::transpose_bytes(col_codes[c], col_codes[c + 1], col_codes[c + 2], col_codes[c + 3]);
  };
  const auto code = [&](int k) {
    const uint32_t left = col_codes[k / 2] >> (4 * (k % 2)) & 0x0F0F0F0Fu;
    const uint32_t right = col_codes[k / 2 + 4] >> (4 * (k % 2)) & 0x0F0F0F0Fu;
    return make_uint2(left, right);
  };
  if (direct) {
    if (!p.col.enabled) return;
    const Place place(static_cast<int>(tile::keep(threadIdx.x) % kQuantizeThreads));
    const uint32_t ld = static_cast<uint32_t>(p.col.ld);
    turn();
    write_whole(whole_at(smem, threadIdx.x, 3) + (ld * place.r + place.c), ld, code);
    return;
  }
  // NOTE: made anew; registers hold no places through the columns.
  const Place place(static_cast<int>(tile::keep(threadIdx.x) % kQuantizeThreads));
  nan = __syncthreads_or(nan);
  t = smem.tile;
  const TileClasses classes = finish_scales<kFmt, true>(p, s, t, sums);

  if (p.row.packed) {
    const Shifts shifts(s.row, classes.row_exponent, true, classes.row);
    const uint4 tables = tables_of(s.row, shifts, place.row_block, place.r, nan);
    write_plain(p.row, t, place, [&](int k) {
      return tile::Fp4Table(smem.tables[half_of(tables, k)]).eight(row_codes[k]);
    });
  }
  if (!p.col.enabled) return;
  if (p.a.col_lies_as_x) {
    turn();
    write_plain(p.col, t, place, code);
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

// Whether all tiles are whole and their outputs plain, in vectors; where these lie.
bool find_whole(RandomParams& p) {
  const QuantizeTask& a = p.q.a;
  const auto whole = [](const CodesOut& out) {
    return !out.enabled || (!out.packed && out.vectors && out.ld <= INT32_MAX / 128);
  };
  if (p.groups.count != 0 || a.col_sum != nullptr || a.rows % 128 != 0 || a.cols % 128 != 0 ||
      a.cols > INT32_MAX / 128 || !whole(p.q.row) || !whole(p.q.col) ||
      reinterpret_cast<uintptr_t>(a.row_scales) % 2 != 0 || (p.q.col.enabled && !a.col_lies_as_x))
    return false;
  const auto ld = [](int64_t codes) { return static_cast<uint32_t>(codes); };
  p.whole[0] = {a.row_scales, 4 * ld(a.cols), 4};
  p.whole[1] = {p.q.row.codes, 128 * ld(p.q.row.ld), 64};
  p.whole[2] = {a.col_scales, 4 * ld(a.cols), 128};
  p.whole[3] = {p.q.col.codes, 128 * ld(p.q.col.ld), 128};
  return true;
}

}  // namespace

Status quantize_both_randomly(const RandomParams& given, cudaStream_t stream) {
  RandomParams p = given;
  for (int i = 0; i < 32; ++i) p.turns[i] = p.size != 0 ? (p.signs >> i & 1) << 31 : 0;
  p.upper = 0xFFFF0000u;
  p.direct = find_whole(p);
  const bool random = p.seed != nullptr;
  const auto kernel = random ? both_kernel<true> : both_kernel<false>;
  constexpr int kBytes = sizeof(RandomSmem), kDrawn = sizeof(RandomSmem::words);
  const int smem = random ? kBytes : kBytes - kDrawn;
  return launch_early(kernel, {tile_grid(p.q, p.q.col_tiles), kQuantizeThreads, stream, smem}, p);
}

}  // namespace te_mx::sm90
