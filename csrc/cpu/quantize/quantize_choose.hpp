// From what a problem asks for to one of the compiled tile kernels.
#pragma once

#include "mxtile/mx/format.hpp"
#include "quantize/quantize.hpp"

namespace te_mx::cpu::quantize_tile {

// Tiles has `template <DType, class E, bool rows, Columns> static void run(const Tile&)`. It
// lies in an unnamed namespace of each per-ISA file, so what this makes of it is that file's own.
template <class Tiles, DType D, class F>
inline Kernel choose(bool rows, Columns columns) {
  constexpr auto none = Columns::none, plain = Columns::plain, transposed = Columns::transposed;
  switch (columns) {
    case Columns::none:
      return rows ? Tiles::template run<D, F, true, none> : Tiles::template run<D, F, false, none>;
    case Columns::plain:
      return rows ? Tiles::template run<D, F, true, plain>
                  : Tiles::template run<D, F, false, plain>;
    default:
      return rows ? Tiles::template run<D, F, true, transposed>
                  : Tiles::template run<D, F, false, transposed>;
  }
}

template <class Tiles, class F>
inline Kernel choose(DType dtype, bool rows, Columns columns) {
  switch (dtype) {
    case DType::f32:
      return choose<Tiles, DType::f32, F>(rows, columns);
    case DType::bf16:
      return choose<Tiles, DType::bf16, F>(rows, columns);
    default:
      return choose<Tiles, DType::f16, F>(rows, columns);
  }
}

template <class Tiles>
inline Kernel choose(DType dtype, Element element, bool rows, Columns columns) {
  if (element == Element::e4m3) return choose<Tiles, mxtile::mx::E4M3>(dtype, rows, columns);
  if (element == Element::e5m2) return choose<Tiles, mxtile::mx::E5M2>(dtype, rows, columns);
  return choose<Tiles, mxtile::mx::E2M1>(dtype, rows, columns);
}

}  // namespace te_mx::cpu::quantize_tile
