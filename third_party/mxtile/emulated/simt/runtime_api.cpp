// The CUDA runtime of emulated devices, of many multiprocessors and of a few, whose work is done
// when a launch returns.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "simt/async.hpp"

namespace simt {

uint32_t cluster_size(const cudaLaunchConfig_t& config) {
  uint32_t size = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
    const auto& dim = config.attrs[i].val.clusterDim;
    if (dim.y != 1 || dim.z != 1) throw Failure("clusters have to lie along x");
    size = dim.x;
  }
  if (size == 0 || size > 16) throw Failure("no such cluster");
  return size;
}

namespace {

// What cudaFuncSetAttribute said. NOTE: of one device, as the emulated ones are alike.
std::map<const void*, size_t> shared_limits;

}  // namespace

void check_shared(const void* kernel, size_t bytes) {
  const auto found = shared_limits.find(kernel);
  if (bytes > (found == shared_limits.end() ? 48 * 1024 : found->second))
    throw Failure("a kernel may not have so much dynamic shared memory");
}

namespace {

// NOTE: callers keep what a device answers, so another size is another device.
int multiprocessors[] = {132, 8};
constexpr int kMostShared = 227 * 1024;  // bytes of a CTA
int current = 0;

int bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
    default:
      return 0;
  }
}

// What the driver refuses, this does; and what tensor_load does not do.
CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const int bytes = bytes_of(type);
  const bool narrow = swizzle == CU_TENSOR_MAP_SWIZZLE_64B;
  if (rank != 2 || bytes == 0 || (swizzle != CU_TENSOR_MAP_SWIZZLE_128B && !narrow) ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      reinterpret_cast<uintptr_t>(base) % 16 != 0 || strides[0] % 16 != 0 || dims[0] == 0 ||
      dims[1] == 0 || dims[0] >> 32 != 0 || dims[1] >> 32 != 0 || box[0] == 0 || box[1] == 0 ||
      box[0] * bytes != (narrow ? 64u : 128u) || box[1] > 256 || steps[0] != 1 || steps[1] != 1)
    return CUDA_ERROR_INVALID_VALUE;
  TensorMap made{};
  made.mark = TensorMap::kMark;
  made.base = static_cast<uint8_t*>(base);
  made.inner = static_cast<int64_t>(dims[0]), made.outer = static_cast<int64_t>(dims[1]);
  made.pitch = static_cast<int64_t>(strides[0]);
  made.box_inner = static_cast<int32_t>(box[0]), made.box_outer = static_cast<int32_t>(box[1]);
  made.element_bytes = bytes, made.type = type;
  static_assert(sizeof made <= sizeof *map);
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

}  // namespace

}  // namespace simt

extern "C" {

// For tests, by ctypes.
#define SIMT_EXPORT __attribute__((visibility("default")))
SIMT_EXPORT void simt_set_seed(uint64_t seed) { simt::set_seed(seed); }
SIMT_EXPORT uint64_t simt_launches() { return simt::launches(); }
SIMT_EXPORT void simt_set_multiprocessors(int count) {
  simt::multiprocessors[simt::current] = count;
}
SIMT_EXPORT void simt_set_device(int device) { simt::current = device; }

cudaError_t cudaGetDevice(int* device) {
  *device = simt::current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device != 0 && device != 1) return cudaErrorInvalidDevice;
  simt::current = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = simt::multiprocessors[simt::current];
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = simt::kMostShared;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated runtime"; }
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > simt::kMostShared)
    return cudaErrorInvalidValue;
  simt::shared_limits[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                           const cudaLaunchConfig_t* config) {
  *clusters = simt::multiprocessors[simt::current] / static_cast<int>(simt::cluster_size(*config));
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** fn, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *fn = known ? reinterpret_cast<void*>(&simt::encode) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
