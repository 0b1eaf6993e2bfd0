// Groups on the host: where they start and end, and what several tasks at a time share.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "te_mx/types.h"

namespace te_mx::cpu {

// The starts and ends of Groups as numbers of this machine.
struct Bounds {
  int64_t count;
  const int64_t* starts;
  const int64_t* ends;

  explicit Bounds(const Groups& g)
      : count(g.count), starts(g.starts), ends(static_cast<const int64_t*>(g.ends)) {}

  int64_t size(int64_t i) const { return ends[i] - starts[i]; }
  // First scale row of a group.
  int64_t first_block(int64_t i, int64_t block = kBlock) const { return starts[i] / block + i; }
};

// ok, or what is wrong with groups of a matrix of `rows` rows.
inline Status check_groups(const Groups& groups, int64_t rows) {
  if (groups.ends_int32 || groups.capacity != 0) return Status::unsupported;
  const Bounds g(groups);
  if (g.count < 0 || (g.count > 0 && (g.starts == nullptr || g.ends == nullptr)))
    return Status::bad_argument;
  int64_t at = 0;
  for (int64_t i = 0; i < g.count; ++i) {
    if (g.starts[i] < at || g.ends[i] < g.starts[i]) return Status::bad_argument;
    at = g.ends[i];
  }
  return at <= rows ? Status::ok : Status::bad_argument;
}

// Calls body(first, end) for the rows before, between and behind the groups.
template <class Body>
void for_gaps(const Bounds& g, int64_t rows, const Body& body) {
  int64_t at = 0;
  for (int64_t i = 0; i <= g.count; ++i) {
    const int64_t next = i < g.count ? g.starts[i] : rows;
    if (next > at) body(at, next);
    if (i < g.count) at = g.ends[i];
  }
}

inline void zero_rows(void* base, int64_t row_bytes, int64_t begin, int64_t end) {
  if (base == nullptr || end <= begin) return;
  std::memset(static_cast<char*>(base) + begin * row_bytes, 0,
              static_cast<size_t>((end - begin) * row_bytes));
}

inline int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// The first error of several tasks.
class FirstError {
 public:
  void add(Status status) {
    int32_t ok = 0;
    if (status != Status::ok) value_.compare_exchange_strong(ok, static_cast<int32_t>(status));
  }
  Status get() const { return static_cast<Status>(value_.load()); }

 private:
  std::atomic<int32_t> value_{0};
};

}  // namespace te_mx::cpu
