#include "gemm/epilogue.hpp"
#include "gemm/epilogue_isa.h"
#include "mxtile/simd/avx2.hpp"

namespace te_mx::cpu {

EpilogueFn avx2_epilogue() { return block_epilogue::run<mxtile::simd::Avx2>; }

}  // namespace te_mx::cpu
