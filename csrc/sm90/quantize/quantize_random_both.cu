// Both directions of a bf16 matrix, or of groups of its rows, to MXFP4 from one read, rounded
// stochastically or to nearest even, the columns after a Hadamard transform or without one.
//
//   read; random words of all elements; scales of the rows, whose blocks lie in four lanes
//   two columns at a time: codes of the rows, four bits each; transformed in fp32, scales of the
//   columns, codes
//   classes; plain codes as they are, codes of E4M3 by tables, as the tile's scales want them
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

// Writes plain codes, of(k) of row k of a thread, where they lie as x does, two a byte or one.
template <class Of>
__device__ __forceinline__ void write_plain(const CodesOut& out, const Tile& t, const Place& at,
                                            const Of& of) {
  const int half = out.nibbles ? 1 : 0;  // as a shift: of eight codes
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

// A thread's numbers; those of a whole tile at once, with no questions.
__device__ __forceinline__ void load_tile(uint32_t (&x)[8][4], const QuantizeParams& p,
                                          const Tile& t, const Place& at, void* slot) {
  const Bf16* const from =
      static_cast<const Bf16*>(p.a.x) + (t.r0 + at.r) * p.a.x_stride + t.c0() + at.c;
  if (!p.x_vectors || t.rows < 128 || t.cols < 128 || p.a.x_stride > INT32_MAX / 2) {
    load_patch<Bf16>(x, from, p.a.x_stride, t.rows - at.r, t.cols - at.c, p.x_vectors, slot);
    return;
  }
  const uint32_t step = 2 * static_cast<uint32_t>(p.a.x_stride);  // NOTE: one product a row
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(reinterpret_cast<const uint8_t*>(from) +
                                                         static_cast<uint64_t>(step) * k));
    x[k][0] = v.x, x[k][1] = v.y, x[k][2] = v.z, x[k][3] = v.w;
  }
}

// Asks for the tile of a CTA that starts about when this one ends, `ahead` later in the grid, so
// that it comes from L2: a line a thread.
__device__ __forceinline__ void ask_ahead(const RandomParams& all, const Tile& t) {
  const QuantizeParams& p = all.q;
  uint32_t x = blockIdx.x + all.ahead;
  int rt = t.rt;
  if (x >= gridDim.x) x -= gridDim.x, rt -= 1 << p.group_bits;
  const int inside = (1 << p.group_bits) - 1;
  rt += static_cast<int>(blockIdx.x & inside) - static_cast<int>(x & inside);
  const int64_t row = 128ll * rt + threadIdx.x / 2;
  const int64_t col = 128ll * (x >> p.group_bits) + 64 * (threadIdx.x % 2);
  if (x >= gridDim.x || rt < 0 || row >= p.a.rows || col >= p.a.cols) return;
  tile::prefetch_l2(static_cast<const Bf16*>(p.a.x) + row * p.a.x_stride + col);
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
  load_tile(all_x, p, t, at, &s.codes[0][0] + 64 * threadIdx.x);
  // NOTE: without random words it costs more than it saves.
  if (kRandom && all.groups.count == 0) ask_ahead(all, t);
  if (threadIdx.x == 0) s.row.clear(), s.col.clear(), smem.tile = t;
  if (threadIdx.x < 16) {
    const tile::Fp4Table table(threadIdx.x);
    smem.tables[threadIdx.x] = threadIdx.x == kNanTable ? make_uint2(0x7F7F7F7Fu, 0x7F7F7F7Fu)
                                                        : make_uint2(table.low, table.high);
  }
  const bool sums = p.a.col_sum != nullptr;
  if (sums) sum_cols<Bf16>(s.sums, all_x, at);

  RowCodes<kRandom> rows(smem, all_x, at, p.a, p.row.packed);
  __syncwarp();
  if (!p.x_vectors) __syncthreads();  // the slots of load_patch() lie elsewhere
  const Slots slots(smem, threadIdx.x % kQuantizeThreads);
  const uint32_t to_even = slots.to_even();
  uint32_t row_codes[8] = {};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const auto& x = all_x[k];
    tile::st_shared_u32x4(Slots::row(to_even, k), make_uint4(x[0], x[1], x[2], x[3]));
  }
  const bool clamps = p.a.rule != ScaleRule::rceil;  // a scale may be too small
  // NOTE: loops, not all eight rows and both columns at once: an SM keeps their code.
  uint2 key = {};
  if constexpr (kRandom) {
    // NOTE: by reductions, so that the keys of all rounds lie in uniform registers.
    key = key_of(all.seed);
    key = make_uint2(__reduce_max_sync(~0u, key.x), __reduce_max_sync(~0u, key.y));
  }
#pragma unroll 1
  for (int h = 0; h < 2; ++h) {
    uint4 words[4] = {};
    if constexpr (kRandom) {
      draw(words, all.first + static_cast<uint32_t>(t.r0 + at.r) + 4 * h, t.c0() + at.c, key);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        tile::st_shared_u32x4(Slots::row(to_even, k) + kWords + 512 * h, words[k]);
    }
    if (!p.row.enabled) continue;
#pragma unroll
    for (int k = 0; k < 4; ++k) row_codes[k] = row_codes[k + 4];
    const uint4 by4 = tile::ld_shared_u32x4(rows.at_by + 16 * h);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 w = tile::ld_shared_u32x4(Slots::row(to_even, k) + 512 * h);
      uint32_t x[4] = {w.x, w.y, w.z, w.w}, by = part(by4, k);
      if (clamps || rows.far)
        rows.prepare(x, by, s.row.blocks[at.row_block][at.r + 4 * h + k], clamps);
      row_codes[4 + k] = rows.codes_of(x, words[k], by);
    }
  }
  bool nan = false;
  if (p.row.enabled) {
    rows.finish(row_codes, smem, at);
    nan = rows.nan;
  }
  if (p.row.enabled && !p.row.packed)
    write_plain(p.row, t, at, [&](int k) { return row_codes[k]; });
  __syncwarp();
  uint32_t col_codes[8];
  if (p.col.enabled) {
    const ColumnCodes<kRandom> cols(t, at);
    uint32_t codes[2][4] = {}, e[2] = {};
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int g = 0; g < 4; ++g) codes[0][g] = codes[1][g];
      __syncwarp();  // or ptxas would read numbers before the loop, and have no registers for them
      e[0] = e[1];
      e[1] = cols.run(codes[1], slots, c, all);
    }
    const uint32_t thread = tile::keep(threadIdx.x) % kQuantizeThreads;  // made anew, as below
    const Slots back(smem, thread);
    const auto found = [](const uint32_t (&w)[4]) {
      return (w[0] | w[1] | w[2] | w[3]) & 0x77777777u;
    };
    const uint32_t any[2] = {found(codes[0]), found(codes[1])};
    const uint32_t warp = thread / 32;
    nan |= cols.finish(s.col, any, e, 64 * (warp % 2) + back.column(0), warp / 2, p.col.packed);
    __syncwarp();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t to = back.codes_to(c);
#pragma unroll
      for (int g = 0; g < 4; ++g) tile::st_shared_u32(to + 256 * g, codes[c][g]);
    }
    __syncwarp();
    const uint32_t from = back.codes_from();
    load_eight(col_codes, from, (from ^ 64) + 128);
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

Status quantize_both_randomly(const RandomParams& given, cudaStream_t stream) {
  RandomParams p = given;
  for (int i = 0; i < 32; ++i) p.turns[i] = p.size != 0 ? (p.signs >> i & 1) << 31 : 0;
  p.ahead = 3 * static_cast<uint32_t>(current_device().sms);
  const bool random = p.seed != nullptr;
  const auto kernel = random ? both_kernel<true> : both_kernel<false>;
  constexpr int kBytes = sizeof(RandomSmem), kDrawn = sizeof(RandomSmem::words);
  const int smem = random ? kBytes : kBytes - kDrawn;
  return launch_early(kernel, {tile_grid(p.q, p.q.col_tiles), kQuantizeThreads, stream, smem}, p);
}

}  // namespace te_mx::sm90
