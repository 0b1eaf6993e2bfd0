// The block epilogue of each instruction set; epilogue.cpp chooses.
#pragma once

#include "gemm/gemm_internal.hpp"

namespace te_mx::cpu {

EpilogueFn portable_epilogue();
EpilogueFn avx2_epilogue();
EpilogueFn avx512_epilogue();

}  // namespace te_mx::cpu
