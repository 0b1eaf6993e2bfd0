#include "te_mx/cpu.h"
namespace te_mx { 
__attribute__((weak)) int64_t packed_bytes(Kernel, Role, int64_t, int64_t){return 0;}
__attribute__((weak)) Status pack(Kernel, Role, const Operand&, void*, int){return Status::unsupported;}
__attribute__((weak)) int64_t workspace_bytes(const GemmArgs&){return 0;}
__attribute__((weak)) Status gemm(GemmArgs&){return Status::unsupported;} }
