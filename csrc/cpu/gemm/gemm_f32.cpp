#include "gemm/gemm_f32_isa.h"

namespace te_mx::cpu {

const KernelImpl* portable_f32_impl() { return f32_on_portable(); }
const KernelImpl* portable_stream_impl() { return stream_f32_on_portable(); }

#if defined(TE_MX_HAVE_AVX2)
const KernelImpl* avx2_f32_impl() { return f32_on_avx2(); }
const KernelImpl* avx2_stream_impl() { return stream_f32_on_avx2(); }
#else
const KernelImpl* avx2_f32_impl() { return nullptr; }
const KernelImpl* avx2_stream_impl() { return nullptr; }
#endif

#if defined(TE_MX_HAVE_AVX512)
const KernelImpl* avx512_f32_impl() { return f32_on_avx512(); }
const KernelImpl* avx512_stream_impl() { return stream_f32_on_avx512(); }
#else
const KernelImpl* avx512_f32_impl() { return nullptr; }
const KernelImpl* avx512_stream_impl() { return nullptr; }
#endif

}  // namespace te_mx::cpu
