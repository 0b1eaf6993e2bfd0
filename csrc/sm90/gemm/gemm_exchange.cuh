// Sums of a block that the CTAs of a cluster have parts of K of: everyone sends what others end,
// adds up what it ends itself, in the order of parts, and has the epilogue of that.
//
// A unit is 8 rows, half of what a warp has sums of. Unit u is ended by CTA u % parts. A warp lays
// its two in shared memory, 256 bytes of 8 columns after another, and sends each by two copies,
// which the barrier of the unit counts where they arrive: no warp waits for another one, no CTA for
// those that are slower, but where it reads what they send.
//
// Where units lie: in stages of the ring, which are over by then, half of their columns where lhs
// was and half where rhs was. Two of the oldest stages are room for what is sent: the producer
// tells the cluster when nobody reads them any more, steps before anybody sends. Behind them are
// two for own units.
#pragma once

#include "gemm/gemm_finish.cuh"
#include "gemm/gemm_kernel.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/multicast.cuh"
#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {

inline constexpr int kUnitBytes = kFinishRows * 128 * 4;

// What a math warp must know of its units. It is worked out during the steps, by another warp:
// behind them every instruction counts.
struct alignas(16) UnitsPlan {
  struct {
    uint32_t from;    // where it lies
    uint32_t cta;     // that ends it
    uint32_t place;   // where the part of this CTA comes to lie there
    uint32_t summed;  // its barrier, at the same place in both
  } unit[2];
  uint32_t empty[2], parity[2];  // of the stages where own units lie
  int m0, n0;                    // of the block
  int units;                     // of it that have rows in D
};

// Shared memory of an exchange.
struct ExchangeRoom {
  UnitsPlan plans[kUnits / 2];
  uint64_t planned;         // by one arrival
  uint64_t room;            // counts the CTAs that may be sent something
  uint64_t summed[kUnits];  // of units that this CTA ends: bytes of the other parts
};

template <class Config>
struct Exchange {
  static constexpr int kStages = Config::kStages, kTile = 16384;
  static constexpr int kHalf = kUnitBytes / 2;
  static constexpr uint32_t kToRight = kStages * kTile;  // from half to half
  static_assert(Config::kLhsBytes == kTile && Config::kRhsBytes == kTile && kStages >= 5);
  static_assert(kUnits * kHalf == 2 * kTile);

  // Two stages, one behind the other, that are over: for what is sent, the oldest ones, and for own
  // units. CTA `rank` has them behind its last step.
  int first, own;
  Ring<kStages> ring;
  __device__ __forceinline__ Exchange(const PartsOfK& k, int rank) {
    const uint32_t steps = k.steps.begin(rank + 1) - k.steps.begin(rank);
    ring.stage = static_cast<int>(steps % kStages), ring.phase = steps / kStages & 1;
    first = ring.stage == kStages - 1 ? 0 : ring.stage;
    own = first + 3 >= kStages ? 0 : first + 2;
  }
  // What the barrier that stage `s` is empty must have passed.
  __device__ __forceinline__ uint32_t parity(int s) const {
    return s >= ring.stage ? ring.phase ^ 1 : ring.phase;
  }
  __device__ __forceinline__ static uint32_t place(const Smem<Config>& smem, int stage, int i) {
    return tile::smem_addr(smem.lhs(stage)) + i * kHalf;
  }
};

// Before the kernel's __syncthreads(), by one thread. NOTE: by a thread each it takes 0.7 us: where
// a barrier lies must be in uniform registers.
__device__ __forceinline__ void init_exchange(ExchangeRoom& room, int parts) {
  tile::mbar_init(&room.planned, kPrepared);
  tile::mbar_init(&room.room, parts);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) tile::mbar_init(room.summed + i, kPrepared);
  tile::mbar_init_fence();
}

// By whole warps, in this order, behind an arrival of all threads: until all CTAs of the cluster
// have barriers. And before a CTA ends, until nobody reads what it sends. NOTE: relaxed. Who has
// received has it, and nothing else needs to be seen by others: a release would wait for D to be
// written.
__device__ __forceinline__ void await_cluster() {
  __syncwarp();
  tile::cluster_wait();
}
__device__ __forceinline__ void leave_cluster() {
  __syncwarp();
  tile::cluster_arrive_relaxed(), tile::cluster_wait();
}

// For a warp that has asked for all steps: tells all CTAs that they may send.
template <class Config>
__device__ __forceinline__ void make_room(const Smem<Config>& smem, const PartsOfK& k, int lane) {
  const Exchange<Config> at(k, static_cast<int>(tile::cluster_rank()));
#pragma unroll
  for (int s = at.first; s < at.first + 2; ++s) tile::mbar_wait(smem.empty(s), at.parity(s));
  await_cluster();
  if (lane < k.parts) tile::mbar_arrive_at(&smem.exchange().room, lane);
}

// For a warp.
template <class Config, class Params>
__device__ __forceinline__ void plan_units(const Smem<Config>& smem, const Params& p, int lane) {
  Scheduler<Params> schedule(p);
  typename Scheduler<Params>::Place block;
  schedule.take(block);
  if (lane < kUnits) {
    UnitsPlan& plan = smem.exchange().plans[lane / 2];
    const int own = static_cast<int>(tile::cluster_rank()), of_two = lane % 2;
    const int index = lane / p.k.parts, cta = lane - index * p.k.parts;
    const int sent = index * (p.k.parts - 1) + own - (own > cta ? 1 : 0);
    const Exchange<Config> here(p.k, own), there(p.k, cta);
    plan.unit[of_two] = {here.place(smem, here.own, lane), static_cast<uint32_t>(cta),
                         there.place(smem, there.first, sent),
                         tile::smem_addr(smem.exchange().summed + index)};
    plan.empty[of_two] = tile::smem_addr(smem.empty(here.own + of_two));
    plan.parity[of_two] = here.parity(here.own + of_two);
    if (of_two == 0) {
      plan.m0 = block.m0(), plan.n0 = block.n0();
      plan.units = min(kUnits, (p.finish.m - block.m0() + kFinishRows - 1) / kFinishRows);
    }
  }
  __syncwarp();
  if (lane < kPrepared) tile::mbar_arrive(&smem.exchange().planned);
}

// For math warps, with their sums.
template <class Config>
__device__ __forceinline__ void send_sums(const float (&v)[64], const Smem<Config>& smem,
                                          const PartsOfK& k) {
  constexpr uint32_t kToRight = Exchange<Config>::kToRight;
  const int thread = tile::keep(threadIdx.x) - 128, lane = thread % 32, warp = thread / 32;
  const UnitsPlan& plan = smem.exchange().plans[warp];
  tile::mbar_wait(&smem.exchange().planned, 0);
#pragma unroll
  for (int i = 0; i < 2; ++i) tile::mbar_wait(plan.empty[i], plan.parity[i]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto to = plan.unit[h];
#pragma unroll
    for (int j = 0; j < 16; ++j)
      tile::st_shared_f32x2(to.from + 8 * lane + 256 * (j % 8) + (j < 8 ? 0 : kToRight),
                            v[4 * j + 2 * h], v[4 * j + 2 * h + 1]);
    tile::fence_async_proxy();
    __syncwarp();
    if (lane >= kPrepared || 2 * warp + h >= plan.units) continue;
    if (to.cta == tile::cluster_rank()) {
      tile::mbar_arrive_expect(to.summed, lane == 0 ? (k.parts - 1) * kUnitBytes : 0);
    } else if (lane == 0) {
      tile::mbar_wait(&smem.exchange().room, 0);
      constexpr uint32_t kHalf = kUnitBytes / 2;
      tile::bulk_send(to.place, to.from, kHalf, to.summed, to.cta);
      tile::bulk_send(to.place + kToRight, to.from + kToRight, kHalf, to.summed, to.cta);
    }
  }
}

// Then: a warp has 16 columns of all units that this CTA ends. Where the parts of the first one
// lie, for this thread: four neighbours in one of 8 rows.
template <class Config>
struct PartsAt {
  static constexpr int kHalf = Exchange<Config>::kHalf;
  int own;
  uint32_t own_at, sent;
  __device__ __forceinline__ PartsAt(const Smem<Config>& smem, const PartsOfK& k, int warp,
                                     int lane)
      : own(static_cast<int>(tile::cluster_rank())) {
    const Exchange<Config> here(k, own);
    const uint32_t offset = warp / 4 * here.kToRight + warp % 4 * 512 + lane * 16;
    own_at = here.place(smem, here.own, own) + offset;
    sent = here.place(smem, here.first, 0) + offset;
  }
  __device__ __forceinline__ uint32_t of(int part) const {
    return part == own ? own_at : sent + (part - (part > own ? 1 : 0)) * kHalf;
  }
  // From unit to unit.
  __device__ __forceinline__ uint32_t step(int part, int parts) const {
    return (part == own ? parts : parts - 1) * kHalf;
  }
};

__device__ __forceinline__ void add(float4& v, const uint4& x) {
  v.x += __uint_as_float(x.x), v.y += __uint_as_float(x.y);
  v.z += __uint_as_float(x.z), v.w += __uint_as_float(x.w);
}
__device__ __forceinline__ float4 no_sum() {  // what leaves every number as it is
  return make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
}

// Where FinishParams::plain. NOTE: a number of parts each: a few instructions in a row, of which
// none waits for another one, take half of the time of a loop.
template <int kParts, class Config>
__device__ __forceinline__ void finish_plain(const FinishParams& p, const Smem<Config>& smem,
                                             const PartsOfK& k, int row, int col, int warp,
                                             int lane, int units) {
  const int end = min(p.m, row / 128 * 128 + 128);
  static_assert(exchange_fits(kParts));
  constexpr int kMost = (kUnits + kParts - 1) / kParts, kAtATime = 4;
  const PartsAt<Config> parts(smem, k, warp, lane);
  uint32_t at[kParts], step[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) at[i] = parts.of(i), step[i] = parts.step(i, kParts);
  const uint32_t summed = tile::smem_addr(smem.exchange().summed);
  const bool wide = p.out.dtype == DType::f32;
  row += parts.own * kFinishRows;
  char* to = static_cast<char*>(p.out.at) + (row * p.out.ld + col) * (wide ? 4 : 2);
  const int64_t down = kParts * kFinishRows * p.out.ld * (wide ? 4 : 2);
#pragma unroll
  for (int first = 0; first < kMost; first += kAtATime) {
    uint4 x[kAtATime][kParts] = {};
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      if (first + j >= kMost) break;
      if (parts.own + (first + j) * kParts >= units) break;
      tile::mbar_wait(summed + 8 * (first + j), 0);
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        x[j][i] = tile::ld_shared_u32x4(at[i]);
        at[i] += step[i];
      }
    }
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      if (first + j >= kMost) break;
      float4 v = no_sum();
#pragma unroll
      for (int i = 0; i < kParts; ++i) add(v, x[j][i]);
      if (row < end && col < p.n) {
        with_type(p.out.dtype, [&]<class T>(T) {
          *reinterpret_cast<Four<T>*>(to) = {
              {static_cast<T>(v.x), static_cast<T>(v.y), static_cast<T>(v.z), static_cast<T>(v.w)}};
        });
      }
      row += kParts * kFinishRows, to += down;
    }
  }
}

// kFewest to kMost: parts that there may be.
template <int kFewest, int kMost, class Config>
__device__ __forceinline__ void finish_sums(const FinishParams& p, const Smem<Config>& smem,
                                            const PartsOfK& k) {
  const int thread = static_cast<int>(threadIdx.x) - 128, lane = thread % 32, warp = thread / 32;
  const UnitsPlan& plan = smem.exchange().plans[warp];
  const int row = plan.m0 + lane % 16 / 2, units = plan.units;
  const int col = plan.n0 + 16 * warp + lane / 16 * 8 + lane % 2 * 4;
  if (p.plain) {
    const auto finish = [&]<int kParts>(const auto& next) {
      if constexpr (kParts < kMost) {
        if (k.parts != kParts) return next.template operator()<kParts + 1>(next);
      }
      if constexpr (exchange_fits(kParts))
        finish_plain<kParts>(p, smem, k, row, col, warp, lane, units);
    };
    return finish.template operator()<kFewest>(finish);
  }
  const PartsAt<Config> parts(smem, k, warp, lane);
  uint32_t summed = tile::smem_addr(smem.exchange().summed);
  int index = 0;
#pragma unroll 1
  for (int unit = parts.own; unit < units; unit += k.parts, ++index, summed += 8) {
    tile::mbar_wait(summed, 0);
    uint4 x[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i < k.parts) x[i] = tile::ld_shared_u32x4(parts.of(i) + index * parts.step(i, k.parts));
    }
    float4 v = no_sum();
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i < k.parts) add(v, x[i]);
    }
    finish_unit(v, p, row + unit * kFinishRows, col, lane);
  }
}

// For math warpgroup `math`: all of it.
template <int kFewest, int kMost, class Config, class Params>
__device__ __forceinline__ void consume_sums(const Params& p, const CUtensorMap& map,
                                             const Smem<Config>& smem, int math) {
  consume<Config, EpilogueKind::sums>(p, map, smem, 0, math,
                                      [&](const float (&sum)[64]) { send_sums(sum, smem, p.k); });
  await_cluster();
  finish_sums<kFewest, kMost>(p.finish, smem, p.k);
}

}  // namespace te_mx::sm90
