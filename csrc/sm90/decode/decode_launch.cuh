// One launcher for every policy of rows.
#pragma once

#include "common/launch.h"
#include "decode/decode_kernel.cuh"

namespace te_mx::sm90 {

inline constexpr int kDecodeSmem = 227 * 1024;

// Fills in how weights [n, k] are cut and what of shared memory goes where for blocks of `rows`
// rows (8, 16, 32 or 64); unsupported where there is no room.
inline Status cut_decode(DecodeParams& p, Element element, int64_t n, int64_t k, int rows,
                         int sms) {
  p.n = static_cast<int>(n), p.k = static_cast<int>(k);
  p.groups = static_cast<int>(decode_groups(n)), p.quads = static_cast<int>(decode_quads(k));
  p.split = decode_split(n, k, sms);
  p.room = decode_room(p.split, k, rows, element, kDecodeSmem);
  return p.room.stages == 0 ? Status::unsupported : Status::ok;
}

// Whether as many weights are on their way at once as HBM wants, or all of a unit's.
inline bool enough(const DecodeParams& p, Element element) {
  const int stage = p.room.stage_quads * decode_quad_bytes(element);
  const int part = (p.room.slice_quads + p.split.parts - 1) / p.split.parts;
  return p.room.stages * p.room.stage_quads >= part ||
         p.split.warps * p.room.stages * stage >= 56 * 1024;
}

// Launches the kernel on `blocks` blocks of at most 8 * kTiles rows.
template <Element kFmt, int kTiles, class Rows>
Status launch_decode(const DecodeParams& p, const Rows& rows, int blocks, void* stream) {
  const auto kernel = &decode_kernel<kFmt, kTiles, Rows>;
  static thread_local int prepared = -1;  // the device whose limit is raised
  int device = 0;
  cudaGetDevice(&device);
  if (prepared != device) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kDecodeSmem);
    if (error != cudaSuccess) return started(error);
    prepared = device;
  }
  cudaLaunchAttribute attributes[] = {early_start(), clusters_of(p.split.cluster)};
  const int clusters = (p.groups + p.split.groups - 1) / p.split.groups;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * p.split.cluster),
                        static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(p.split.warps * 32));
  config.dynamicSmemBytes = static_cast<size_t>(p.room.bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  return started(cudaLaunchKernelEx(&config, kernel, p, rows));
}

}  // namespace te_mx::sm90
