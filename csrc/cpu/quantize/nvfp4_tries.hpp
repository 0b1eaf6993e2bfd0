// Four over six: two scales are tried for every block, which make its largest magnitude 6 or 4, and
// the one with the smaller error is taken. Part of nvfp4_loops.hpp.
#pragma once

namespace te_mx::cpu::nvfp4 {
namespace {

// As Whole, and the magnitude.
struct Tried {
  float scale, encode, amax;
};
inline Tried tried_of(uint32_t bits, float top) {
  const float amax = mx::as_float(bits);
  const float encode = bits == 0 ? 1.0f : least(top / amax, kLargest);
  return {1.0f / encode, encode, amax};
}

// A vector of blocks: both scales of each, and the sums of what they miss.
template <class S>
struct Two {
  ScaleVector<S> four, six;
  typename S::F of_four, of_six, amax;  // values of the scales
  typename S::F four_off, six_off;
};

template <class S>
MXTILE_WORD Two<S> two_of(typename S::F bamax, typename S::F scale, typename S::F encode,
                          typename S::F amax) {
  const auto base = S::mul(S::div(number_of<S>(bamax), S::set(6.0f)), encode);
  Two<S> two;
  two.amax = amax, two.four_off = two.six_off = S::set(0.0f);
  const auto one = [&](typename S::F wanted, ScaleVector<S>& s, typename S::F& value) {
    s.code = code_of<S, mx::E4M3, -6>(wanted);
    value = mxtile::simd::decode<S, mx::E4M3>(s.code);
    s.factor = S::min(S::div(S::set(1.0f), S::mul(value, scale)), S::set(kLargest));
  };
  one(S::mul(base, S::set(1.5f)), two.four, two.of_four);
  one(base, two.six, two.of_six);
  return two;
}

// 16 elements of each of the blocks, vectors so many apart, in order.
template <class S>
MXTILE_WORD void add_errors(const uint32_t* x, int64_t step, const Tile& t, Two<S>& two) {
  const auto all = S::iset(static_cast<int32_t>(kMagnitude));
  const auto top = S::set(t.top);
  for (int i = 0; i < kB; ++i) {
    const auto bits = load_bits<S>(x + i * step);
    const auto off = [&](typename S::F factor, typename S::F scale, typename S::F& sum) {
      const auto code = encode<S, ScaleRule::te_4over6>(bits, factor);
      const auto value = mxtile::simd::decode<S, mx::E2M1>(code);
      const auto meant = S::div(S::mul(S::mul(value, scale), two.amax), top);
      const auto miss = S::sub(meant, S::as_float(bits));
      const auto size = S::as_float(S::iand(S::as_int(miss), all));
      sum = S::add(sum, t.squares ? S::mul(miss, miss) : size);
    };
    off(two.four.factor, two.of_four, two.four_off);
    off(two.six.factor, two.of_six, two.six_off);
  }
}

template <class S>
MXTILE_WORD ScaleVector<S> better_of(const Two<S>& two) {
  const auto pick = [&](typename S::F a, typename S::F b) {
    return S::select_lt(two.four_off, two.six_off, a, b);
  };
  return {S::as_int(pick(S::as_float(two.four.code), S::as_float(two.six.code))),
          pick(two.four.factor, two.six.factor)};
}

// Blocks of a row side by side: element i of block b at [i][b].
using Turned = uint32_t[kB][kBlocks];
inline void turn_blocks(const uint32_t* row, Turned& out) {
  for (int i = 0; i < kB; ++i) {
    for (int b = 0; b < kBlocks; ++b) out[i][b] = row[b * kB + i];
  }
}

template <class S>
void try_rows(const Tile& t, const Values& x, Scales& out) {
  for (int r = 0; r < t.rows; ++r) {
    const Tried one = tried_of(t.row_amax[r * t.row_amax_stride], t.top);
    const auto scale = S::set(one.scale), encode = S::set(one.encode), amax = S::set(one.amax);
    alignas(64) Turned turned;
    turn_blocks(x[r], turned);
    for (int b = 0; b < kBlocks; b += S::kLanes) {
      const auto bamax = block_maxima<S>(x[r] + b * kB);
      Two<S> two = two_of<S>(bamax, scale, encode, amax);
      add_errors<S>(turned[0] + b, kBlocks, t, two);
      put_scales<S>(bamax, better_of<S>(two), r * kBlocks + b, out);
    }
  }
}

template <class S>
void try_columns(const Tile& t, const Values& x, Scales& out) {
  alignas(64) float scale[kCols], encode[kCols], amax[kCols];
  for (int c = 0; c < kCols; ++c) {
    const int from = c < t.cols ? c : 0;
    const Tried one = tried_of(t.col_amax[from * t.col_amax_stride], t.top);
    scale[c] = one.scale, encode[c] = one.encode, amax[c] = one.amax;
  }
  for (int c = 0; c < kCols; c += S::kLanes) {
    const auto bamax = column_maxima<S>(x, c);
    Two<S> two = two_of<S>(bamax, S::load(scale + c), S::load(encode + c), S::load(amax + c));
    add_errors<S>(x[0] + c, kCols, t, two);
    put_scales<S>(bamax, better_of<S>(two), c, out);
  }
}

// Sums of 16 rows, or columns, as of a tree: the first half to the second.
template <class F, class Add>
MXTILE_WORD F sum_of_tree(F* sums, const Add& add) {
  for (int half = kB / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] = add(sums[i], sums[i + half]);
  }
  return sums[0];
}

template <class S>
MXTILE_WORD typename S::F square_maxima(const Values& x, int block) {
  auto most = S::iset(0);
  for (int r = 0; r < kRows; ++r) {
    most = larger<S>(most, S::as_int(block_maxima<S>(x[r] + block * kB)));
  }
  return S::as_float(most);
}

// Blocks of 16 x 16, whose errors are summed along rows first.
template <class S>
void try_square(const Tile& t, const Values& x, Scales& out) {
  using F = typename S::F;
  const Tried one = tried_of(t.row_amax[0], t.top);
  alignas(64) float four[kRows][kBlocks], six[kRows][kBlocks];
  const auto two_at = [&](F bamax) {
    return two_of<S>(bamax, S::set(one.scale), S::set(one.encode), S::set(one.amax));
  };
  for (int b = 0; b < kBlocks; b += S::kLanes) {
    const Two<S> start = two_at(square_maxima<S>(x, b));
    for (int r = 0; r < kRows; ++r) {
      alignas(64) Turned turned;
      turn_blocks(x[r], turned);
      Two<S> two = start;
      add_errors<S>(turned[0] + b, kBlocks, t, two);
      S::store(four[r] + b, two.four_off), S::store(six[r] + b, two.six_off);
    }
  }
  for (int b = 0; b < kBlocks; b += S::kLanes) {
    const F bamax = square_maxima<S>(x, b);
    Two<S> two = two_at(bamax);
    const auto add = [](F a, F c) { return S::add(a, c); };
    F fours[kRows], sixes[kRows];
    for (int r = 0; r < kRows; ++r) fours[r] = S::load(four[r] + b), sixes[r] = S::load(six[r] + b);
    two.four_off = sum_of_tree(fours, add), two.six_off = sum_of_tree(sixes, add);
    put_scales<S>(bamax, better_of<S>(two), b, out);
  }
}

// The same along columns first.
template <class S>
void try_square_columns(const Tile& t, const Values& x, Scales& out) {
  using F = typename S::F;
  const Tried one = tried_of(t.col_amax[0], t.top);
  const auto two_at = [&](F bamax) {
    return two_of<S>(bamax, S::set(one.scale), S::set(one.encode), S::set(one.amax));
  };
  alignas(64) float bamax[kBlocks], each[kCols], four[kCols], six[kCols];
  for (int b = 0; b < kBlocks; b += S::kLanes) S::store(bamax + b, square_maxima<S>(x, b));
  for (int c = 0; c < kCols; ++c) each[c] = bamax[c / kB];
  for (int c = 0; c < kCols; c += S::kLanes) {
    Two<S> two = two_at(S::load(each + c));
    add_errors<S>(x[0] + c, kCols, t, two);
    S::store(four + c, two.four_off), S::store(six + c, two.six_off);
  }
  const auto add = [](float a, float c) { return a + c; };
  for (int b = 0; b < kBlocks; ++b) {
    four[b] = sum_of_tree(four + b * kB, add), six[b] = sum_of_tree(six + b * kB, add);
  }
  for (int b = 0; b < kBlocks; b += S::kLanes) {
    Two<S> two = two_at(S::load(bamax + b));
    two.four_off = S::load(four + b), two.six_off = S::load(six + b);
    put_scales<S>(S::load(bamax + b), better_of<S>(two), b, out);
  }
}

}  // namespace
}  // namespace te_mx::cpu::nvfp4
