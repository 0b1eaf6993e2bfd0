#include "common/isa.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "mxtile/simd/cpu.hpp"

namespace te_mx::cpu {
namespace {

constexpr const char* kNames[] = {"portable",    "avx2", "avx512",
                                  "avx512_bf16", "amx",  "amx_emulated"};
constexpr char kEnvironment[] = "TE_MX_CPU_ISA";

#if defined(TE_MX_HAVE_AVX2)
constexpr bool kBuiltAvx2 = true;
#else
constexpr bool kBuiltAvx2 = false;
#endif
#if defined(TE_MX_HAVE_AVX512)
constexpr bool kBuiltAvx512 = true;
#else
constexpr bool kBuiltAvx512 = false;
#endif
#if defined(TE_MX_HAVE_AVX512_BF16)
constexpr bool kBuiltAvx512Bf16 = true;
#else
constexpr bool kBuiltAvx512Bf16 = false;
#endif
#if defined(TE_MX_HAVE_AMX)
constexpr bool kBuiltAmx = true;
#else
constexpr bool kBuiltAmx = false;
#endif

Isa detect() {
  const mxtile::CpuFeatures cpu = mxtile::cpu_features();
  if (!kBuiltAvx2 || !cpu.avx2) return Isa::portable;
  if (!kBuiltAvx512 || !cpu.avx512) return Isa::avx2;
  if (!kBuiltAvx512Bf16 || !cpu.avx512_bf16 || !cpu.avx512_vbmi) return Isa::avx512;
  if (!kBuiltAmx || !cpu.amx_bf16 || !mxtile::request_amx()) return Isa::avx512_bf16;
  return Isa::amx;
}

// What the environment asks for, or why it cannot be had.
struct Choice {
  Isa level;
  char error[256];

  Choice() : level(isa_best()), error{} {
    const char* asked = std::getenv(kEnvironment);
    if (asked == nullptr || *asked == 0) return;
    for (int i = 0; i < 6; ++i) {
      if (std::strcmp(asked, kNames[i]) != 0) continue;
      if (isa_available(static_cast<Isa>(i))) {
        level = static_cast<Isa>(i);
      } else {
        std::snprintf(
            error, sizeof error,
            "%s=%s asks for more than this CPU and this build have; the highest level here is %s. "
            "Unset it or choose that level or a lower one.",
            kEnvironment, asked, isa_name(isa_best()));
      }
      return;
    }
    std::snprintf(
        error, sizeof error,
        "%s must be one of portable, avx2, avx512, avx512_bf16, amx, amx_emulated; got '%.60s'. "
        "Unset it to use the best level of this CPU.",
        kEnvironment, asked);
  }
};

const Choice& environment_choice() {
  static const Choice choice;
  return choice;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> level{environment_choice().level};
  return level;
}

Isa level_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::wide_f64:
    case Kernel::portable_f32:
    case Kernel::portable_stream:
      return Isa::portable;
    case Kernel::avx2_f32:
    case Kernel::avx2_stream:
      return Isa::avx2;
    case Kernel::avx512_f32:
    case Kernel::avx512_stream:
      return Isa::avx512;
    case Kernel::avx512_bf16:
    case Kernel::avx512_bf16_stream:
      return Isa::avx512_bf16;
    default:
      return Isa::amx;
  }
}

}  // namespace

const char* isa_name(Isa level) { return kNames[static_cast<int>(level)]; }

Isa isa_best() {
  static const Isa best = detect();
  return best;
}

const char* isa_env_error() {
  const char* error = environment_choice().error;
  return *error == 0 ? nullptr : error;
}

Isa isa_current() { return current().load(std::memory_order_relaxed); }

bool isa_available(Isa level) {
  return level == Isa::amx_emulated || (level >= Isa::portable && level <= isa_best());
}

Status set_isa(Isa level) {
  if (level < Isa::portable || level > Isa::amx_emulated) return Status::bad_argument;
  if (!isa_available(level)) return Status::unsupported;
  current().store(level, std::memory_order_relaxed);
  return Status::ok;
}

Isa isa_native() {
  const Isa level = isa_current();
  return level == Isa::amx_emulated ? std::min(isa_best(), Isa::avx512_bf16) : level;
}

bool kernel_available(Kernel kernel) {
  if (kernel < Kernel::wide_f64 || kernel >= Kernel::count) return false;
  const Isa needed = level_of(kernel);
  return needed <= isa_native() || (needed == Isa::amx && isa_current() == Isa::amx_emulated);
}

}  // namespace te_mx::cpu
