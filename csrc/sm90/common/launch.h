// How kernels that wait for their predecessors are launched.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "common/device.h"

namespace te_mx::sm90 {

// So many CTAs next to each other make a cluster.
inline cudaLaunchAttribute clusters_of(int ctas) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(ctas);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

struct Launch {
  dim3 grid, block;
  void* stream;
  int smem = 0;       // bytes of dynamic shared memory
  int cluster = 0;    // CTAs next to each other, or 0
  bool early = true;  // or after the kernel before it has ended
};

// Launches a kernel that may start while the one before it ends: it sets itself up and then waits
// for it (mxtile's await_predecessors). Only for kernels that wait before they touch global memory.
template <class... Params, class... Args>
Status launch_early(void (*kernel)(Params...), const Launch& at, Args&&... args) {
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (at.smem > 0) {
    const Status status = allow_smem(reinterpret_cast<const void*>(kernel));
    if (status != Status::ok) return status;
  }
  if (at.early) {
    cudaLaunchAttribute& early = attributes[count++] = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (at.cluster != 0) attributes[count++] = clusters_of(at.cluster);
  cudaLaunchConfig_t config{};
  config.gridDim = at.grid, config.blockDim = at.block;
  config.dynamicSmemBytes = static_cast<size_t>(at.smem);
  config.stream = static_cast<cudaStream_t>(at.stream);
  config.attrs = attributes, config.numAttrs = count;
  return started(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

}  // namespace te_mx::sm90
