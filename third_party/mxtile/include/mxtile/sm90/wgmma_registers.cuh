// Warpgroup matrix multiply-accumulate with A from registers: D[64, N] (+)= A[64, K] @ B[N, K]^T
// for N = 8, 16, 32, 64, 128 or 256 and 32 bytes of K: 32 FP8 codes, or 16 numbers of fp16 or bf16.
//
// B lies in shared memory as in wgmma.cuh: rows of 128 bytes under the 128-byte swizzle, groups of
// 8 rows 1024 bytes apart. Lane 4g + t of warp w has of A four words:
//   a[0]: row 16w + g, bytes 4t .. 4t + 3 along K      a[2]: the same row, bytes 16 + 4t ..
//   a[1]: row 16w + g + 8, the same bytes              a[3]: row 16w + g + 8, bytes 16 + 4t ..
// Accumulators lie as in wgmma.cuh: for j < N / 8
//   d[4j + 0], d[4j + 1]: row 16w + g, columns 8j + 2t, + 1
//   d[4j + 2], d[4j + 3]: row 16w + g + 8, the same columns
#pragma once

#include "mxtile/sm90/wgmma.cuh"

namespace mxtile::sm90 {

// wgmma_desc of a shared address.
__device__ __forceinline__ uint32_t wgmma_desc_at(uint32_t tile) {
  return ((tile & 0x3FFFF) >> 4) | (1u << 16);
}

// Keeps the making of A before what follows. NOTE: to be called before wgmma_fence; words that were
// made behind it make ptxas wait after every instruction (C7520).
__device__ __forceinline__ void wgmma_pin(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// SHAPE and TYPES name the instruction, TAIL is what follows its other immediates.
#define MXTILE_WGMMA_REGISTERS_8(SHAPE, TYPES, TAIL)                  \
  asm volatile(                                                       \
      "{\n.reg .pred p;\n.reg .b64 b;\n"                              \
      "setp.ne.b32 p, %9, 0;\nmov.b64 b, {%8, %10};\n"                \
      "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES             \
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, b, p, 1, 1" TAIL ";\n}\n" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdd ? 1 : 0), "n"(kDescHigh))

#define MXTILE_WGMMA_REGISTERS_16(SHAPE, TYPES, TAIL)                                       \
  asm volatile(                                                                             \
      "{\n.reg .pred p;\n.reg .b64 b;\n"                                                    \
      "setp.ne.b32 p, %13, 0;\nmov.b64 b, {%12, %14};\n"                                    \
      "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES                                   \
      " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, b, p, 1, 1" TAIL ";\n}\n"     \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
        "+f"(d[7])                                                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdd ? 1 : 0), "n"(kDescHigh))

#define MXTILE_WGMMA_REGISTERS_32(SHAPE, TYPES, TAIL)                                           \
  asm volatile(                                                                                 \
      "{\n.reg .pred p;\n.reg .b64 b;\n"                                                        \
      "setp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, %22};\n"                                        \
      "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES                                       \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "               \
      "{%16, %17, %18, %19}, b, p, 1, 1" TAIL ";\n}\n"                                          \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
        "+f"(d[14]), "+f"(d[15])                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdd ? 1 : 0), "n"(kDescHigh))

#define MXTILE_WGMMA_REGISTERS_64(SHAPE, TYPES, TAIL)                                              \
  asm volatile(                                                                                    \
      "{\n.reg .pred p;\n.reg .b64 b;\n"                                                           \
      "setp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, %38};\n"                                           \
      "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES                                          \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "          \
      "{%32, %33, %34, %35}, b, p, 1, 1" TAIL ";\n}\n"                                             \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdd ? 1 : 0), "n"(kDescHigh))

#define MXTILE_WGMMA_REGISTERS_128(SHAPE, TYPES, TAIL)                                             \
  asm volatile(                                                                                    \
      "{\n.reg .pred p;\n.reg .b64 b;\n"                                                           \
      "setp.ne.b32 p, %69, 0;\nmov.b64 b, {%68, %70};\n"                                           \
      "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES                                          \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "          \
      "{%64, %65, %66, %67}, b, p, 1, 1" TAIL ";\n}\n"                                             \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63])                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdd ? 1 : 0), "n"(kDescHigh))

#define MXTILE_WGMMA_REGISTERS_256(SHAPE, TYPES, TAIL)                                             \
  asm volatile(                                                                                    \
      "{\n.reg .pred p;\n.reg .b64 b;\n"                                                           \
      "setp.ne.b32 p, %133, 0;\nmov.b64 b, {%132, %134};\n"                                        \
      "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES                                          \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "           \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "           \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
      "%111, "                                                                                     \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
      "%127}, "                                                                                    \
      "{%128, %129, %130, %131}, b, p, 1, 1" TAIL ";\n}\n"                                         \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), \
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), \
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), \
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),          \
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),        \
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),        \
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),        \
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdd ? 1 : 0), "n"(kDescHigh))

#define MXTILE_WGMMA_REGISTERS(K, TYPES, TAIL)            \
  if constexpr (kFloats == 4) {                           \
    MXTILE_WGMMA_REGISTERS_8("m64n8" K, TYPES, TAIL);     \
  } else if constexpr (kFloats == 8) {                    \
    MXTILE_WGMMA_REGISTERS_16("m64n16" K, TYPES, TAIL);   \
  } else if constexpr (kFloats == 16) {                   \
    MXTILE_WGMMA_REGISTERS_32("m64n32" K, TYPES, TAIL);   \
  } else if constexpr (kFloats == 32) {                   \
    MXTILE_WGMMA_REGISTERS_64("m64n64" K, TYPES, TAIL);   \
  } else if constexpr (kFloats == 64) {                   \
    MXTILE_WGMMA_REGISTERS_128("m64n128" K, TYPES, TAIL); \
  } else {                                                \
    static_assert(kFloats == 128);                        \
    MXTILE_WGMMA_REGISTERS_256("m64n256" K, TYPES, TAIL); \
  }

// kFloats = N / 2; kA: the codes of A, those of B are E4M3; b: wgmma_desc. Without kAdd D is
// overwritten. Neither a nor d may be touched until it is done.
template <Fp8 kA, bool kAdd, int kFloats>
__device__ __forceinline__ void wgmma_registers(float (&d)[kFloats], const uint32_t (&a)[4],
                                                uint32_t b) {
  static_assert(is_fp8(kA));
  if constexpr (kA == Fp8::e4m3) {
    MXTILE_WGMMA_REGISTERS("k32", "e4m3.e4m3", "")
  } else {
    MXTILE_WGMMA_REGISTERS("k32", "e5m2.e4m3", "")
  }
}

// The same of 16 fp16 numbers.
template <bool kAdd, int kFloats>
__device__ __forceinline__ void wgmma_registers_f16(float (&d)[kFloats], const uint32_t (&a)[4],
                                                    uint32_t b) {
  MXTILE_WGMMA_REGISTERS("k16", "f16.f16", ", 0")
}

// And of 16 bf16 numbers.
template <bool kAdd, int kFloats>
__device__ __forceinline__ void wgmma_registers_bf16(float (&d)[kFloats], const uint32_t (&a)[4],
                                                     uint32_t b) {
  MXTILE_WGMMA_REGISTERS("k16", "bf16.bf16", ", 0")
}
#undef MXTILE_WGMMA_REGISTERS
#undef MXTILE_WGMMA_REGISTERS_8
#undef MXTILE_WGMMA_REGISTERS_16
#undef MXTILE_WGMMA_REGISTERS_32
#undef MXTILE_WGMMA_REGISTERS_64
#undef MXTILE_WGMMA_REGISTERS_128
#undef MXTILE_WGMMA_REGISTERS_256

}  // namespace mxtile::sm90
