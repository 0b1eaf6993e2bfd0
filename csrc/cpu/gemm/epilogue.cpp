#include "common/isa.h"
#include "gemm/epilogue_isa.h"

namespace te_mx::cpu {

EpilogueFn epilogue_for(Isa isa) {
  if (isa == Isa::amx_emulated) isa = isa_native();
#if defined(TE_MX_HAVE_AVX512)
  if (isa >= Isa::avx512) return avx512_epilogue();
#endif
#if defined(TE_MX_HAVE_AVX2)
  if (isa >= Isa::avx2) return avx2_epilogue();
#endif
  return portable_epilogue();
}

}  // namespace te_mx::cpu
