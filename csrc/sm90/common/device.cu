#include "common/device.h"

#include <atomic>
#include <iterator>

namespace te_mx::sm90 {

namespace {

thread_local cudaError_t last_failure = cudaSuccess;

}  // namespace

Status started(cudaError_t error) {
  if (error == cudaSuccess) return Status::ok;
  last_failure = error;
  cudaGetLastError();  // or a later check would take it for its own
  return Status::launch_failed;
}

const char* error_text() {
  return last_failure == cudaSuccess ? "" : cudaGetErrorString(last_failure);
}

uint64_t capture_number(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error =
      cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id);
  return error == cudaSuccess && status == cudaStreamCaptureStatusActive ? id : 0;
}

Device current_device() {
  static std::atomic<int> sms[64];
  Device device{-1, 0};
  if (cudaGetDevice(&device.index) != cudaSuccess) return device;
  const int slot = device.index & 63;
  device.sms = sms[slot].load(std::memory_order_relaxed);
  if (device.sms == 0) {
    cudaDeviceGetAttribute(&device.sms, cudaDevAttrMultiProcessorCount, device.index);
    sms[slot].store(device.sms, std::memory_order_relaxed);
  }
  return device;
}

Status allow_smem(const void* kernel) {
  int device = 0;
  cudaGetDevice(&device);
  static std::atomic<uint64_t> allowed[1024];
  const uint64_t key = reinterpret_cast<uintptr_t>(kernel) ^ static_cast<uint64_t>(device) << 48;
  const uint64_t first = key >> 4 ^ key >> 14 ^ key >> 48;
  std::atomic<uint64_t>* place = nullptr;
  // NOTE: where eight others are, the last one makes room and is asked about again.
  for (int i = 0; i < 8; ++i) {
    place = &allowed[(first + i) % std::size(allowed)];
    const uint64_t there = place->load(std::memory_order_relaxed);
    if (there == key) return Status::ok;
    if (there == 0) break;
  }
  int most = 0;
  cudaFuncAttributes has;
  cudaError_t error =
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&has, kernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(has.sharedSizeBytes));
  }
  if (error != cudaSuccess) return started(error);
  place->store(key, std::memory_order_relaxed);
  return Status::ok;
}

DeviceScope::DeviceScope(int device) {
  int current = 0;
  if (device < 0 || cudaGetDevice(&current) != cudaSuccess || current == device) return;
  if (cudaSetDevice(device) == cudaSuccess) before_ = current;
}

DeviceScope::~DeviceScope() {
  if (before_ >= 0) cudaSetDevice(before_);
}

}  // namespace te_mx::sm90
