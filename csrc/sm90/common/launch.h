// Launch attributes that several kernels share.
#pragma once

#include <cuda_runtime_api.h>

#include "common/device.h"

namespace te_mx::sm90 {

// Lets a kernel start while the one before it ends: it sets itself up and then waits for it
// (mxtile's await_predecessors). Only for kernels that wait before they touch global memory.
inline cudaLaunchAttribute early_start() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// So many CTAs next to each other make a cluster.
inline cudaLaunchAttribute clusters_of(int ctas) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(ctas);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

}  // namespace te_mx::sm90
