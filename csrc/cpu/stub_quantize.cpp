#include "te_mx/cpu.h"
namespace te_mx { __attribute__((weak)) Status quantize(const QuantizeArgs&){return Status::unsupported;} __attribute__((weak)) Status dequantize(const DequantizeArgs&){return Status::unsupported;} }
