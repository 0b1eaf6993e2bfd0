// Backward pass of a normalization that reads dz and x once: clusters keep a group of eight rows in
// shared memory from the sums over them to dx, group after group.
//
// A sum over a row runs in 256 lanes, a lane over every 256th column (te_mx/fused.h). So a CTA has
// whole lanes: kWidth columns of every 256, a piece. The lanes of a row come together in one CTA of
// the cluster, which sends the sums to all. A thread has a patch of 8 x 8, the same columns in
// every group. As it is done with a row of it, it asks for what comes there next.
#include "common/launch.h"
#include "fused/norm_backward.cuh"
#include "fused/norm_stats.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "quantize/quantize_launch.h"

namespace te_mx::sm90 {

namespace {

using T = __nv_bfloat16;

struct StripParams {
  NormGradTask a;
  int pieces;    // in a row
  int64_t unit;  // rows of a cluster; the last has what is left
};

template <int kCtas_>
struct Strips {
  static constexpr int kRows = 8, kCtas = kCtas_, kWidth = 256 / kCtas;
  static constexpr int kChunks = kWidth / 8;    // patches in a piece
  static constexpr int kOfWarp = 32 / kChunks;  // pieces whose patches are those of a warp
  static constexpr int kSums = kWidth / 32;     // columns of a row that a thread sums, row `warp`
  static constexpr int kMine = kRows / kCtas;   // rows whose lanes come together in a CTA
  static constexpr int kBlock = kRows * 32;     // chunks of 16 bytes of a warp's patches

  struct Smem {
    uint64_t lanes_came, sums_came;
    alignas(16) float4 rows[2][kRows];  // of two groups: mean, rstd and both sums
    float lanes[2][kCtas][kMine][kWidth];
  };
  static constexpr int blocks(int pieces) { return (pieces + kOfWarp - 1) / kOfWarp; }
  static constexpr int smem_bytes(int pieces) {
    return static_cast<int>(sizeof(Smem)) + 2 * blocks(pieces) * kBlock * 16;
  }
};

// kSums neighbouring elements.
template <int kSums>
__device__ __forceinline__ void unpack_some(float (&v)[kSums], const T* from) {
  uint32_t words[kSums / 2];
  if constexpr (kSums == 2) {
    words[0] = *reinterpret_cast<const uint32_t*>(from);
  } else {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    words[0] = two.x, words[1] = two.y;
  }
#pragma unroll
  for (int j = 0; j < kSums / 2; ++j)
    v[2 * j] = low_bf16(words[j]), v[2 * j + 1] = high_bf16(words[j]);
}
template <>
__device__ __forceinline__ void unpack_some<1>(float (&v)[1], const T* from) {
  v[0] = __bfloat162float(*from);
}

template <int kSums>
__device__ __forceinline__ void send_some(float* to, const float (&v)[kSums], uint64_t* bar,
                                          int cta) {
  const auto word = [&](int j) { return __float_as_uint(v[j]); };
  if constexpr (kSums == 1) {
    tile::send(to, word(0), bar, cta);
  } else if constexpr (kSums == 2) {
    tile::send(to, make_uint2(word(0), word(1)), bar, cta);
  } else {
    tile::send(to, make_uint4(word(0), word(1), word(2), word(3)), bar, cta);
  }
}

// The sum of 256 lanes: 32 j + i is v[j] of thread i of the warp.
__device__ __forceinline__ float sum_lanes(float (&v)[8]) {
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
#pragma unroll
    for (int j = 0; j < step; ++j) v[j] = add(v[j], v[j + step]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v[0] = add(v[0], __shfl_xor_sync(~0u, v[0], step));
  return v[0];
}

// Both sums of every row of a group, for all CTAs of the cluster. When it returns, every thread of
// the CTA has read what it sums.
template <class S>
__device__ __forceinline__ void sum_group(typename S::Smem& s, const uint4* dz, const uint4* x,
                                          const StripParams& p, int cta, int turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool rms = p.a.rms;
  if (threadIdx.x == 0) {
    const int sums = rms ? 1 : 2;
    tile::mbar_arrive_expect(&s.lanes_came, sums * static_cast<int>(sizeof(s.lanes[0])));
    tile::mbar_arrive_expect(&s.sums_came, sums * S::kRows * 4);
  }
  const int c = S::kSums * lane;
  const float4 of = s.rows[turn][warp];
  float shift[S::kSums]{}, drift[S::kSums]{};
  const float* weight = static_cast<const float*>(p.a.weight) + S::kWidth * cta + c;
#pragma unroll 4
  for (int i = 0; i < p.pieces; ++i, weight += 256) {
    const int chunk = i / S::kOfWarp * S::kBlock + warp * 32 + i % S::kOfWarp * S::kChunks + c / 8;
    float d[S::kSums], h[S::kSums], w[S::kSums];
    unpack_some<S::kSums>(d, reinterpret_cast<const T*>(dz + chunk) + c % 8);
    unpack_some<S::kSums>(h, reinterpret_cast<const T*>(x + chunk) + c % 8);
    if constexpr (S::kSums == 4) {
      *reinterpret_cast<float4*>(w) = __ldg(reinterpret_cast<const float4*>(weight));
    } else {
#pragma unroll
      for (int j = 0; j < S::kSums; ++j) w[j] = __ldg(weight + j);
    }
#pragma unroll
    for (int j = 0; j < S::kSums; ++j) {
      const float v = mul(d[j], w[j]);
      if (!rms) h[j] = sub(h[j], of.x), shift[j] = add(shift[j], v);
      drift[j] = add(drift[j], mul(v, mul(h[j], of.y)));
    }
  }
  const int to = warp % S::kCtas, there = warp / S::kCtas;
  if (!rms) send_some<S::kSums>(&s.lanes[0][cta][there][c], shift, &s.lanes_came, to);
  send_some<S::kSums>(&s.lanes[1][cta][there][c], drift, &s.lanes_came, to);

  static_assert(2 * S::kMine <= 8);  // a warp for each sum
  const int which = warp / S::kMine, mine = warp % S::kMine;
  if (which == 1 || (which == 0 && !rms)) {
    tile::mbar_wait_sent(&s.lanes_came, turn);
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      v[j] = s.lanes[which][32 * j / S::kWidth][mine][32 * j % S::kWidth + lane];
    const float sum = mul(sum_lanes(v), p.a.inverse);
    float4* const row = &s.rows[turn][cta + mine * S::kCtas];
    if (lane < S::kCtas)
      tile::send(which == 0 ? &row->z : &row->w, __float_as_uint(sum), &s.sums_came, lane);
  }
  // NOTE: sums of all rows are there, so whoever made them has the lanes of every warp.
  tile::mbar_wait_sent(&s.sums_came, turn);
}

template <int kCtas>
__global__ void __launch_bounds__(kQuantizeThreads, 3)
    norm_backward_strips_kernel(const __grid_constant__ StripParams p) {
  using S = Strips<kCtas>;
  extern __shared__ __align__(16) char smem[];
  typename S::Smem& s = *reinterpret_cast<typename S::Smem*>(smem);
  uint4* const dz = reinterpret_cast<uint4*>(smem + sizeof(typename S::Smem));
  uint4* const x = dz + S::blocks(p.pieces) * S::kBlock;
  const NormGradTask& a = p.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, cta = tile::cluster_rank();
  const int piece = warp * S::kOfWarp + lane / S::kChunks;
  const bool exists = piece < p.pieces;
  uint4 *const dz_slot = dz + warp * S::kBlock + lane, *const x_slot = x + (dz_slot - dz);
  const int64_t unit = blockIdx.x / kCtas,
                col = 256ll * piece + S::kWidth * cta + lane % S::kChunks * 8;
  int64_t row0 = unit * p.unit;
  const int64_t end = min(row0 + p.unit, a.rows);
  if (threadIdx.x == 0) {
    tile::mbar_init(&s.lanes_came, 1), tile::mbar_init(&s.sums_came, 1);
    tile::mbar_init_fence();
  }
  tile::let_dependents_start();
  tile::cluster_arrive();
  tile::await_predecessors();
  const auto load_statistics = [&](int turn) {
    if (threadIdx.x >= S::kRows) return;
    const int64_t r = row0 + threadIdx.x;
    float4& of = s.rows[turn][threadIdx.x];
    of.x = a.rms ? 0.0f : __ldg(a.mean + r), of.y = __ldg(a.rstd + r), of.z = 0.0f;
  };
  const auto load_row = [&](int k) {
    const int64_t r = row0 + k;
    __pipeline_memcpy_async(dz_slot + 32 * k,
                            static_cast<const T*>(a.dz.data) + r * a.dz.stride + col, 16);
    __pipeline_memcpy_async(x_slot + 32 * k, static_cast<const T*>(a.x.data) + r * a.x.stride + col,
                            16);
  };
  load_statistics(0);
  if (exists) {
#pragma unroll
    for (int k = 0; k < 8; ++k) load_row(k);
  }
  tile::cluster_wait();  // every CTA's barriers are there
  float2 dweight[4]{}, dbias[4]{};
#pragma unroll 1
  for (int turn = 0; row0 < end; turn ^= 1) {
    wait_for_slots();
    __syncthreads();
    sum_group<S>(s, dz, x, p, cta, turn);
    T* to = static_cast<T*>(a.dx) + row0 * a.cols + col;
    row0 += S::kRows;
    const bool more = row0 < end;
    if (more) load_statistics(turn ^ 1);
    if (!exists) continue;
    Eight<float> factors;
    load_8(factors, static_cast<const float*>(a.weight) + col, 8, true);
    float weight[8];
    factors.unpack(weight);
#pragma unroll 2
    for (int k = 0; k < 8; ++k, to += a.cols) {
      const float4 of = s.rows[turn][k];
      float d[8], h[8];
      Eight<T> one, two;
      one.chunks[0] = dz_slot[32 * k], two.chunks[0] = x_slot[32 * k];
      one.unpack(d), two.unpack(h);
      finish_gradients(d, h, weight, of, a.rms, dweight, dbias);
      if (more) load_row(k);
      *reinterpret_cast<uint4*>(to) = Eight<T>(d).chunks[0];
    }
  }
  if (!exists) return;
  float* const sums = a.partial + unit * 2 * a.cols + col;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    reinterpret_cast<float4*>(sums)[j] =
        make_float4(dweight[2 * j].x, dweight[2 * j].y, dweight[2 * j + 1].x, dweight[2 * j + 1].y);
    reinterpret_cast<float4*>(sums + a.cols)[j] =
        make_float4(dbias[2 * j].x, dbias[2 * j].y, dbias[2 * j + 1].x, dbias[2 * j + 1].y);
  }
}

// A cluster has as many groups as let all clusters run at once, or kMost. NOTE: it does
// not depend on the device, so that dweight and dbias do not.
template <int kCtas, int64_t kMost>
Status launch(const NormGradTask& a, int pieces, cudaStream_t stream) {
  using S = Strips<kCtas>;
  constexpr int64_t kClusters = kStripsAtOnce / kCtas;
  const int64_t groups = a.rows / S::kRows, share = (groups + kClusters - 1) / kClusters;
  const int64_t each = share < kMost ? share : kMost, units = (groups + each - 1) / each;
  const StripParams p{a, pieces, each * S::kRows};
  const auto kernel = norm_backward_strips_kernel<kCtas>;
  const int smem = S::smem_bytes(pieces);
  const dim3 grid(static_cast<unsigned>(units * kCtas));
  const Status status = launch_early(kernel, {grid, kQuantizeThreads, stream, smem, kCtas}, p);
  if (status != Status::ok) return status;
  return launch_two_sums(a.partial, a.dweight, a.dbias, DType::f32, units, a.cols, stream);
}

}  // namespace

bool fits_strips(const NormGradTask& a) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  // NOTE: fewer columns would leave most threads without a patch.
  return a.dz_dtype == DType::bf16 && a.x_dtype == DType::bf16 && a.dx_dtype == DType::bf16 &&
         a.weight_dtype == DType::f32 && a.rows % 8 == 0 && a.cols % 256 == 0 && a.cols >= 2048 &&
         a.cols <= 16384 && a.dz.stride % 8 == 0 && a.x.stride % 8 == 0 && aligned(a.dz.data) &&
         aligned(a.x.data) && aligned(a.weight) && aligned(a.dx) && aligned(a.partial);
}

Status norm_backward_strips(const NormGradTask& a) {
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const int pieces = static_cast<int>(a.cols / 256);
  // Three CTAs fit on an SM for the longest rows of each. Pairs of CTAs fill the GPU; larger
  // clusters do not, and run in several rounds.
  constexpr int64_t kAny = INT64_MAX;
  return pieces <= 16   ? launch<2, kAny>(a, pieces, stream)
         : pieces <= 32 ? launch<4, 8>(a, pieces, stream)
                        : launch<8, 8>(a, pieces, stream);
}

}  // namespace te_mx::sm90
