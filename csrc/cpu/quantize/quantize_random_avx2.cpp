// The tile kernel that rounds at random and transforms, for AVX2.
#include "quantize/quantize_random_loops.hpp"

namespace te_mx::cpu::quantize_tile {

Kernel find_random_avx2(Element element) { return choose_random(element); }

}  // namespace te_mx::cpu::quantize_tile
