// Arithmetic on sizes.
#pragma once

#include <cstdint>

namespace te_mx::cpu {

// static: per-ISA files must not share an out-of-line copy with the others.
static constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
static constexpr int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

}  // namespace te_mx::cpu
