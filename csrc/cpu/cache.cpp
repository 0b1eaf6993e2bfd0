#include "cache.h"

#include <cstdio>

namespace te_mx {
namespace {

constexpr int64_t kUnknown = 32 << 20;

// Linux's own account of the caches that cpu0 sees. sysconf(_SC_LEVEL3_CACHE_SIZE) reports the sum
// over all sockets' slices on some processors, ten times what a core can use.
int64_t read_sysfs() {
  for (int index = 3; index >= 2; --index) {
    char path[64];
    std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
    std::FILE* file = std::fopen(path, "r");
    if (file == nullptr) continue;
    long long size = 0;
    char unit = 0;
    const int fields = std::fscanf(file, "%lld%c", &size, &unit);
    std::fclose(file);
    if (fields < 1 || size <= 0) continue;
    return size * (unit == 'K' ? 1 << 10 : unit == 'M' ? 1 << 20 : 1);
  }
  return kUnknown;
}

}  // namespace

int64_t last_level_cache_bytes() {
  static const int64_t bytes = read_sysfs();
  return bytes;
}

}  // namespace te_mx
