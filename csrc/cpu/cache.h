// What the kernels ask about the memory of this machine.
#pragma once

#include <cstdint>

namespace te_mx {

// Bytes of the last cache before memory; 32 MiB where the system does not say.
int64_t last_level_cache_bytes();

}  // namespace te_mx
