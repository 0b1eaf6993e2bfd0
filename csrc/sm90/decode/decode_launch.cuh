// One launcher for every policy of rows.
#pragma once

#include "common/launch.h"
#include "decode/decode_kernel.cuh"

namespace te_mx::sm90 {

// Fills in how weights [n, k] are cut and what of shared memory goes where for blocks of `rows`
// rows (8, 16 or 32), x resident or in steps; unsupported where there is no room.
inline Status cut_decode(DecodeParams& p, Element element, int64_t n, int64_t k, int rows,
                         bool resident, int sms) {
  p.n = static_cast<int>(n), p.k = static_cast<int>(k);
  p.groups = static_cast<int>(decode_groups(n)), p.quads = static_cast<int>(decode_quads(k));
  p.split = decode_split(n, k, sms);
  const int parts = p.split.cluster * p.split.parts;
  p.cluster_bits = p.split.cluster == 8 ? 3 : p.split.cluster / 2;
  p.part_quads = p.quads / parts, p.longer_parts = p.quads % parts;
  p.room = decode_room(p.split, k, rows, element, resident);
  return p.room.stages == 0 ? Status::unsupported : Status::ok;
}

// Prepares `blocks` blocks of `rows` rows in a workspace of so many decode_input_bytes(rows) *
// quads, for kernels that follow at once.
template <class Rows>
Status launch_prepare(DecodeParams& p, const Rows& rows, int room_rows, int blocks, void* workspace,
                      void* stream) {
  p.in.made = static_cast<const uint8_t*>(workspace);
  cudaLaunchAttribute attributes[] = {early_start()};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((p.quads + 1) / 2), static_cast<unsigned>(blocks));
  config.blockDim = dim3(256);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 1;
  return started(cudaLaunchKernelEx(&config, &prepare_rows<Rows>, p.in, rows, room_rows,
                                    int64_t{p.k}, p.quads));
}

// Launches the kernel on `blocks` blocks of at most 8 * kTiles rows. kSteps: launch_prepare ran
// just before, with the same rows.
template <Element kFmt, int kTiles, bool kSteps, class Rows>
Status launch_decode(const DecodeParams& p, const Rows& rows, int blocks, void* stream) {
  const auto kernel = &decode_kernel<kFmt, kTiles, kSteps, Rows>;
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
  config.gridDim =
      dim3(static_cast<unsigned>(clusters * p.split.cluster), static_cast<unsigned>(blocks));
  config.blockDim = dim3(kDecodeThreads);
  config.dynamicSmemBytes = static_cast<size_t>(p.room.bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  return started(cudaLaunchKernelEx(&config, kernel, p, rows));
}

}  // namespace te_mx::sm90
