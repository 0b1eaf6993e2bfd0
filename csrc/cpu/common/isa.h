// The instruction-set level in force. The public questions are in te_mx/cpu.h.
#pragma once

#include "te_mx/cpu.h"

namespace te_mx::cpu {

const char* isa_name(Isa level);
// The level whose per-file flags may run now: isa_current(), with amx_emulated read as what lies
// under it.
Isa isa_native();

}  // namespace te_mx::cpu
