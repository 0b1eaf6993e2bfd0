#include "gemm/epilogue.hpp"
#include "gemm/epilogue_isa.h"
#include "mxtile/simd/portable.hpp"

namespace te_mx::cpu {

EpilogueFn portable_epilogue() { return block_epilogue::run<mxtile::simd::Portable>; }

}  // namespace te_mx::cpu
