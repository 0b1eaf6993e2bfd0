// How CTAs of a small grid come to lie on all multiprocessors.
#pragma once

#include <cstdint>

#include "common/device.h"

namespace te_mx::sm90 {

// Bytes of dynamic shared memory that leave no room on an SM for more of so many CTAs than each SM
// has in the mean. NOTE: a kernel that starts while the one before it leaves SM after SM would
// otherwise have all of its CTAs on the first ones: 224 CTAs that unpack 512 rows of x took 8 us
// behind a product, and 3.5 alone (NVIDIA H200, 2026-11-30).
inline int spread_smem(int64_t ctas) {
  constexpr int kSmem = 228 << 10, kFew = 4;  // of an SM
  const int sms = current_device().sms;
  const int64_t each = sms == 0 ? kFew + 1 : (ctas + sms - 1) / sms;
  return each > kFew ? 0 : static_cast<int>(kSmem / (each + 1));
}

}  // namespace te_mx::sm90
