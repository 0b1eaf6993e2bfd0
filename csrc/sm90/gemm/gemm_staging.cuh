// The staging of a math warpgroup: slots of 64 rows x 128 bytes between registers and the copy
// engine, both ways.
//
// A warp writes and reads its own 16 rows only, so the warps of a warpgroup meet just where thread
// 0 hands slots to the copy engine or gets them back.
#pragma once

#include "gemm/gemm_rows.cuh"
#include "mxtile/sm90/swizzle.cuh"
#include "mxtile/sm90/tma.cuh"

namespace te_mx::sm90 {

inline constexpr int kPanelBytes = 64 * 128;  // 64 rows of 128 bytes: what one TMA store writes

// Slots that are filled and sent at a time. The others are on their way meanwhile.
template <int kSlots>
inline constexpr int kTogether = kSlots < 2 ? kSlots : 2;

// Until the copy engine has read what was in the slots that are filled next.
template <int kSlots>
__device__ __forceinline__ void free_staging(const Wave& w) {
  if (w.thread == 0) tile::tma_store_wait_read<kSlots / kTogether<kSlots> - 1>();
  tile::named_barrier(w.barrier, 128);
}

// One panel of columns, 128 bytes wide, from registers to a slot. Of fp32, 16 lanes store at once,
// four rows, of which two meet in the same banks. With kSpread, which costs 16 selects, odd rows
// take other columns than even ones then.
template <class T, bool kSpread = false>
__device__ __forceinline__ void stage_panel(const float (&v)[64], const int panel, const int slot,
                                            const Wave& w) {
  const int lane = w.thread % 32, warp = w.thread / 32;
  const uint32_t base = tile::smem_addr(w.staging + slot * kPanelBytes);
  if constexpr (sizeof(T) == 4 && kSpread) {
    const uint32_t row = warp * 16 + lane / 4, offset = 8 * (lane % 2);
    const bool odd = row % 2 != 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t chunk = (4 * k + 2 * j + (lane % 4) / 2) ^ (odd ? 4 : 0);
        float to[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = panel * 16 + 4 * j + i;  // and 8 further on, those of four chunks on
          to[i] = odd ? v[at + 8 * (1 - k)] : v[at + 8 * k];
        }
        tile::st_shared_f32x2(base + tile::swizzle128(row, chunk) + offset, to[0], to[1]);
        tile::st_shared_f32x2(base + tile::swizzle128(row + 8, chunk) + offset, to[2], to[3]);
      }
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = panel * 16 + 4 * j;
      const uint32_t row = warp * 16 + lane / 4;
      const uint32_t chunk = 2 * j + (lane % 4) / 2, offset = 8 * (lane % 2);
      tile::st_shared_f32x2(base + tile::swizzle128(row, chunk) + offset, v[i], v[i + 1]);
      tile::st_shared_f32x2(base + tile::swizzle128(row + 8, chunk) + offset, v[i + 2], v[i + 3]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const int i = panel * 32 + 4 * j;
      const uint32_t row = warp * 16 + lane % 16, chunk = j + lane / 16;
      tile::stmatrix_x4(base + tile::swizzle128(row, chunk), pair_bits<T>(v[i], v[i + 1]),
                        pair_bits<T>(v[i + 2], v[i + 3]), pair_bits<T>(v[i + 4], v[i + 5]),
                        pair_bits<T>(v[i + 6], v[i + 7]));
    }
  }
}

// Slots from the staging of `w` on, panels `first` and on of D, to global memory.
template <class T, int kCount>
__device__ __forceinline__ void send_panels(const int first, const EpilogueParams& p,
                                            const CUtensorMap* map, const bool add, const Wave& w) {
  tile::fence_async_proxy();
  tile::named_barrier(w.barrier, 128);
  if (w.thread == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int n0 = w.n0 + (first + i) * static_cast<int>(128 / sizeof(T));
      if (w.m0 >= w.m_end || n0 >= p.n) continue;
      char* const slot = w.staging + i * kPanelBytes;
      if (add) {
        tile::tma_reduce_add(map, slot, n0, w.m0);
      } else {
        tile::tma_store(map, slot, n0, w.m0);
      }
    }
    tile::tma_store_commit();
  }
}

// The whole wave, whose first slots are free. fp32 may be added to what is there. The slots take
// turns, over the waves of a block as well: each of them leaves whole groups.
template <class T, int kSlots, bool kSpread = false>
__device__ __forceinline__ void store_wave(const float (&v)[64], const EpilogueParams& p,
                                           const CUtensorMap* map, const bool add, const Wave& w) {
  constexpr int kPanels = sizeof(T);  // 128 columns in panels of 128 bytes
  constexpr int kAtOnce = kTogether<kSlots>;
#pragma unroll
  for (int first = 0; first < kPanels; first += kAtOnce) {
    if (first != 0) free_staging<kSlots>(w);
    Wave now = w;
    now.staging += (w.wave * kPanels + first) % kSlots * kPanelBytes;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) stage_panel<T, kSpread>(v, first + i, i, now);
    send_panels<T, kAtOnce>(first, p, map, sizeof(T) == 4 && add, now);
  }
}

// The whole wave by its warps alone: each stages 16 rows and stores them, 16 bytes a
// thread, so that nobody waits for the copy engine or for another warp. NOTE: which of both is
// faster is measured (GemmConfig::kByWarps).
template <class T, int kSlots>
__device__ __forceinline__ void store_by_warps(const float (&v)[64], const EpilogueParams& p,
                                               const Wave& w) {
  constexpr int kColumns = 16 / sizeof(T);  // of a thread
  const int lane = w.thread % 32, row = w.thread / 32 * 16 + lane / 8, chunk = lane % 8;
  const int64_t pitch = p.ldo * static_cast<int64_t>(sizeof(T));
  uint8_t* const to = static_cast<uint8_t*>(p.out) + (w.m0 + row) * pitch +
                      (w.n0 + chunk * kColumns) * static_cast<int64_t>(sizeof(T));
  const int rows = w.m_end - w.m0 - row;
#pragma unroll
  for (int panel = 0; panel < static_cast<int>(sizeof(T)); ++panel) {
    const int slot = panel % kSlots;
    stage_panel<T>(v, panel, slot, w);
    __syncwarp();
    const uint32_t base = tile::smem_addr(w.staging + slot * kPanelBytes);
    const bool inside = w.n0 + (8 * panel + chunk) * kColumns < p.n;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 q = tile::ld_shared_u32x4(base + tile::swizzle128(row + 4 * i, chunk));
      if (inside && 4 * i < rows) *reinterpret_cast<uint4*>(to + 4 * i * pitch + 128 * panel) = q;
    }
    if (panel % kSlots == kSlots - 1) __syncwarp();  // its rows are free again
  }
}

// Gives the staging to the epilogue warp, behind a fence_async_proxy().
__device__ __forceinline__ void leave_staging(const Wave& w) {
#ifndef TE_MX_RACECHECK
  __syncwarp();
  if (w.thread % 32 != 0) return;
#endif
  tile::mbar_arrive(w.staged);
}

// What the epilogue warp brought of four neighbouring 8x8 blocks: those of v[8 * part] and after,
// in pairs.
__device__ __forceinline__ void read_ahead(uint32_t (&x)[4], const int part, const Wave& w) {
  const int lane = w.thread % 32, warp = w.thread / 32;
  const uint32_t row = warp * 16 + lane % 16, chunk = part % 4 * 2 + lane / 16;
  tile::ldmatrix_x4(
      x, tile::smem_addr(w.staging + part / 4 * kPanelBytes) + tile::swizzle128(row, chunk));
}

}  // namespace te_mx::sm90
