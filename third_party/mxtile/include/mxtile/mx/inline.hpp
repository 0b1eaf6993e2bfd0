// MXTILE_INLINE: files are compiled for different instruction sets, and an inline function left as
// a symbol of its own could be linked from the wrong one. Inlining always leaves no such symbol.
#pragma once

#if defined(_MSC_VER) && !defined(__clang__)
#define MXTILE_INLINE __forceinline
#else
#define MXTILE_INLINE inline __attribute__((always_inline))
#endif
