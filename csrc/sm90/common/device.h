// The device that a call runs on.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "te_mx/types.h"

namespace te_mx::sm90 {

struct Device {
  int index;
  int sms;  // 0: there is no device
};

// Asks the driver once for each device.
Device current_device();

// The status of a launch, or of a call on its way there; error_text() says what the runtime said.
Status started(cudaError_t error);

// Lets a kernel have all the dynamic shared memory that a CTA of the current device may have. Asks
// the driver once for each kernel and device: it is called at every launch.
Status allow_smem(const void* kernel);

// Of the last launch of this thread that failed; "" without one.
const char* error_text();

// The number of the graph capture that a stream records; 0 for none.
uint64_t capture_number(void* stream);

// Makes `device` current and the former one again at the end; -1 leaves things as they are.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = -1;
};

}  // namespace te_mx::sm90
