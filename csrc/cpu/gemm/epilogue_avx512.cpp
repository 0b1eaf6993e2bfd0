#include "gemm/epilogue.hpp"
#include "gemm/epilogue_isa.h"
#include "mxtile/simd/avx512.hpp"

namespace te_mx::cpu {

EpilogueFn avx512_epilogue() { return block_epilogue::run<mxtile::simd::Avx512>; }

}  // namespace te_mx::cpu
