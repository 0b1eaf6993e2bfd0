#include "device.h"

#include <cuda_runtime_api.h>

namespace te_mx::sm90 {

DeviceScope::DeviceScope(int device) {
  int current = 0;
  if (device < 0 || cudaGetDevice(&current) != cudaSuccess || current == device) return;
  if (cudaSetDevice(device) == cudaSuccess) before_ = current;
}

DeviceScope::~DeviceScope() {
  if (before_ >= 0) cudaSetDevice(before_);
}

}  // namespace te_mx::sm90
