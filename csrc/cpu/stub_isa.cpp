#include "te_mx/cpu.h"
namespace te_mx { 
__attribute__((weak)) Isa isa_best(){return Isa::portable;}
__attribute__((weak)) Isa isa_current(){return Isa::portable;}
__attribute__((weak)) bool isa_available(Isa l){return l==Isa::portable;}
__attribute__((weak)) Status set_isa(Isa){return Status::unsupported;}
__attribute__((weak)) bool kernel_available(Kernel){return false;} }
