// The one rule by which kernels cut K, and other things, into parts: all are as long as the last
// one, or one step longer, which the first ones are.
#pragma once

#include <cstdint>

namespace te_mx::sm90 {

struct Shares {
  int least = 0, longer = 0;
  __host__ __device__ int begin(int part) const {
    return part * least + (part < longer ? part : longer);
  }
};
// Of `all` steps in so many parts.
inline Shares shares_of(int64_t all, int64_t parts) {
  return {static_cast<int>(all / parts), static_cast<int>(all % parts)};
}

// The steps of K in parts, which are added up in their order.
struct PartsOfK {
  int parts = 1;
  Shares steps;
};
inline PartsOfK parts_of_k(int64_t steps, int parts) { return {parts, shares_of(steps, parts)}; }

// Share i: [first, last).
struct Range {
  int first, last;
  __device__ __forceinline__ Range(const Shares& shares, int i)
      : first(shares.begin(i)), last(shares.begin(i + 1)) {}
};

}  // namespace te_mx::sm90
