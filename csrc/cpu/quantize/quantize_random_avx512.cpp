// The tile kernel that rounds at random and transforms, for AVX-512.
#include "quantize/quantize_random_loops.hpp"

namespace te_mx::cpu::quantize_tile {

Kernel find_random_avx512(Element element) { return choose_random(element); }

}  // namespace te_mx::cpu::quantize_tile
