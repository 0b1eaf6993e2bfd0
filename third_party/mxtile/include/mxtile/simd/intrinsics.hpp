// <immintrin.h>, where the target is x86-64.
#pragma once

#if defined(__x86_64__)
// gcc 12 takes the undefined pass-through operand of many AVX-512 intrinsics for a use of an
// uninitialized variable.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
