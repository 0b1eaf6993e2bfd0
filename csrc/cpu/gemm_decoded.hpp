// The bf16 panel GEMM that decodes one side itself: when few panels of the other side stay in L2,
// every panel of this one is wanted once or twice, and packing it ahead would send twice its bytes
// through the third-level cache and back.
//
//   item               all or a part of the resident panels x some streamed ones
//     k chunk          all of k, or what leaves room for the sums
//       streamed pair  decoded while the pair before is multiplied
//         resident panel
//
// The sums have the order and the bits of PanelGemm.
#pragma once

#include "decode_bf16.hpp"
#include "gemm_bf16.hpp"

namespace te_mx {

// Engine: that of PanelGemm, and kMostBlocks, kResident, kMostParts, kPartBytes, kSums, kNearBlocks.
template <class Engine, class Decoder, Role kStreamed>
class DecodedGemm {
 public:
  // Whether to decode this side.
  static bool takes(const GemmArgs& args) {
    const Operand& own = kStreamed == Role::lhs ? args.lhs : args.rhs;
    const Operand& other = kStreamed == Role::lhs ? args.rhs : args.lhs;
    if (own.packed != nullptr) return false;
    // The bias gradient of kind operand reads panels of lhs.
    if (kStreamed == Role::lhs && args.bias_grad_kind == BiasGrad::operand) return false;
    const int64_t panels = ceil_div(other.rows, kRowBlock);
    return ceil_div(panels, part_of(panels, ceil_div(own.k, kBlock))) <= Engine::kMostParts;
  }

  static Status run(const Range& range, const void* resident, const EpilogueContext& context) {
    const DecodedGemm gemm(range, static_cast<const char*>(resident), context);
    const int64_t parts = ceil_div(gemm.resident_panels_, gemm.part_);
    parallel_for(context.args->threads, gemm.items(), [&](int64_t item) {
      gemm.run_item(item % parts * gemm.part_, item / parts * gemm.share_);
    });
    return Status::ok;
  }

 private:
  using Simd = typename Engine::Simd;
  using Stream = TileStream<Decoder, kStreamed == Role::rhs, Engine::kMostBlocks>;
  static constexpr bool kLhs = kStreamed == Role::lhs;
  static constexpr int64_t kPair = Stream::kPanels;

  // Everything an engine does next to its products.
  class Work {
   public:
    Work(PendingRows<Simd>& pending, Stream& stream, const char* far, int lines)
        : pending_(pending), stream_(stream), far_(far), lines_(lines) {}

    TE_MX_MEMBER void begin(int64_t steps) {
      rows_a_step_ = static_cast<int>(ceil_div(pending_.left(), steps));
    }
    TE_MX_MEMBER void step() {
      for (int r = 0; r < rows_a_step_ && pending_.left() > 0; ++r) pending_.row();
      for (int i = 0; i < lines_; ++i, far_ += 64) __builtin_prefetch(far_, 0, 2);
      stream_.step();
    }

   private:
    PendingRows<Simd>& pending_;
    Stream& stream_;
    const char* far_;
    int lines_, rows_a_step_ = 0;
  };

  // Two streamed panels of one k chunk.
  struct Unit {
    int64_t panel, panels, block, blocks;
  };

  DecodedGemm(const Range& range, const char* resident, const EpilogueContext& context)
      : range_(range),
        args_(*context.args),
        context_(context),
        resident_(resident),
        first_row_(kLhs ? range.m0 : range.n0),
        streamed_(part_of_rows(kLhs ? args_.lhs : args_.rhs, first_row_,
                               kLhs ? range.m1 : range.n1)),
        epilogue_(epilogue_for(isa_current())) {
    const int64_t lhs_panels = ceil_div(range.m1 - range.m0, kRowBlock);
    const int64_t rhs_panels = ceil_div(range.n1 - range.n0, kRowBlock);
    resident_panels_ = kLhs ? rhs_panels : lhs_panels;
    streamed_panels_ = kLhs ? lhs_panels : rhs_panels;
    blocks_ = ceil_div(args_.lhs.k, kBlock);
    only_scaled_ = only_scaled_rows<Simd>(context, range);
    part_ = part_of(resident_panels_, blocks_);
    share_ = round_up(streamed_panels_, kPair);
    chunk_ = blocks_;
    if (part_ * blocks_ * kStepBytes > Engine::kWholeBytes || blocks_ > Engine::kMostBlocks) {
      const int64_t fit = Engine::kPartBytes / (part_ * kStepBytes);
      chunk_ = even_part(blocks_, clamp(fit, 1, Engine::kMostBlocks));
      share_ = least(share_, Engine::kSums / part_ / kPair * kPair);
    }
    while (share_ > kPair && items() < Engine::kItems * args_.threads) {
      share_ = round_up((share_ + 1) / 2, kPair);
    }
  }

  // Resident panels of one item: all that stay in L2 with all of k, else so few that there is room
  // for a long chunk and for sums.
  static int64_t part_of(int64_t panels, int64_t blocks) {
    const int64_t fit = Engine::kWholeBytes / (blocks * kStepBytes);
    const bool whole = blocks <= Engine::kMostBlocks && fit >= least(Engine::kResident, panels);
    return even_part(panels, whole ? fit : Engine::kResident);
  }

  static Operand part_of_rows(const Operand& all, int64_t begin, int64_t end) {
    Operand part = all;
    part.codes += begin * all.code_row_stride;
    part.scales += begin * all.scale_row_stride;
    part.rows = end - begin;
    return part;
  }
  static int64_t even_part(int64_t whole, int64_t most) {
    return ceil_div(whole, ceil_div(whole, most));
  }
  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
  static int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : least(x, high);
  }

  int64_t items() const {
    return ceil_div(resident_panels_, part_) * ceil_div(streamed_panels_, share_);
  }

  const char* resident_at(int64_t panel, int64_t block) const {
    return resident_ + (panel * blocks_ + block) * kStepBytes;
  }

  const uint8_t* codes_of(const Unit& unit) const {
    return streamed_.codes + unit.panel * kRowBlock * streamed_.code_row_stride +
           unit.block * kBlock * streamed_.code_k_stride;
  }

  // The unit after this one in the item [begin, end); that of block blocks_ when there is none.
  Unit after(const Unit& unit, int64_t begin, int64_t end) const {
    Unit next = unit;
    next.panel += kPair;
    if (next.panel >= end) {
      next.panel = begin;
      next.block += chunk_;
    }
    next.panels = least(kPair, end - next.panel);
    next.blocks = least(chunk_, blocks_ - next.block);
    return next;
  }

  void run_item(int64_t first_resident, int64_t begin) const {
    alignas(64) uint16_t decoded[2][Stream::kWords];
    alignas(64) float sums[Engine::kSums * kBlockFloats];
    const int64_t part = least(part_, resident_panels_ - first_resident);
    const int64_t end = least(begin + share_, streamed_panels_);
    Engine engine;
    PendingRows<Simd> pending(context_);
    const float* exponents = (kLhs ? context_.lhs_exp : context_.rhs_exp) + first_row_;
    Stream stream(streamed_, exponents);
    Unit unit{begin, least(kPair, end - begin), 0, least(chunk_, blocks_)};
    start(stream, unit, decoded[0], 1, begin, end);
    int64_t turn = 0, block_turn = 0;
    while (unit.block < blocks_) {
      stream.finish();
      const Unit next = after(unit, begin, end);
      const bool more = next.block < blocks_;
      if (more) start(stream, next, decoded[turn ^ 1], unit.panels * part * unit.blocks, begin, end);
      const bool last = unit.block + unit.blocks == blocks_;
      for (int64_t j = 0; j < unit.panels; ++j) {
        const char* own =
            reinterpret_cast<const char*>(decoded[turn]) + j * unit.blocks * kStepBytes;
        for (int64_t i = 0; i < part; ++i) {
          const int64_t kept = (unit.panel + j - begin) * part + i;
          float* c = sums + (chunk_ == blocks_ ? (block_turn ^= 1) : kept) * kBlockFloats;
          Work work = work_of(pending, stream, unit, first_resident + i, j, begin, end);
          multiply(engine, own, first_resident + i, unit, j, c, work);
          pending.finish();
          if (last) put(pending, c, first_resident + i, unit.panel + j);
        }
      }
      unit = next;
      turn ^= 1;
    }
    pending.finish();
    pending.fence();
  }

  void start(Stream& stream, const Unit& unit, uint16_t* to, int64_t steps, int64_t begin,
             int64_t end) const {
    const Unit next = after(unit, begin, end);
    const int64_t ahead = next.block < blocks_ ? codes_of(next) - codes_of(unit) : 0;
    stream.start(unit.panel, unit.panels, unit.block, unit.blocks, to, steps, ahead);
  }

  // The resident chunk that comes next, spread over the streamed panels of this one.
  Work work_of(PendingRows<Simd>& pending, Stream& stream, const Unit& unit, int64_t resident,
               int64_t j, int64_t begin, int64_t end) const {
    const int64_t next = unit.block + unit.blocks;
    if (!Engine::kPrefetch || next >= blocks_) return Work(pending, stream, nullptr, 0);
    const int64_t lines = ceil_div(unit.blocks * kStepBytes, (end - begin) * unit.blocks * 64);
    const char* far = resident_at(resident, next) +
                      (unit.panel + j - begin) * lines * unit.blocks * 64;
    return Work(pending, stream, far, static_cast<int>(lines));
  }

  void multiply(Engine& engine, const char* own, int64_t resident, const Unit& unit, int64_t j,
                float* c, Work& work) const {
    const char* other = resident_at(resident, unit.block);
    const int64_t lhs_panel = kLhs ? unit.panel + j : resident;
    const int rows =
        static_cast<int>(least(kRowBlock, range_.m1 - range_.m0 - lhs_panel * kRowBlock));
    const bool near = unit.blocks <= Engine::kNearBlocks;
    const Reuse reuse = !near ? Reuse::none : kLhs ? Reuse::lhs : Reuse::rhs;
    engine.block(kLhs ? own : other, kLhs ? other : own, unit.blocks, rows, c, unit.block == 0,
                 reuse, work);
  }

  // NOTE: inlined, gcc 12 warns of bounds that no loop here passes.
  [[gnu::noinline]] void put(PendingRows<Simd>& pending, float* c, int64_t resident, int64_t streamed) const {
    const int64_t m = range_.m0 + (kLhs ? streamed : resident) * kRowBlock;
    const int64_t n = range_.n0 + (kLhs ? resident : streamed) * kRowBlock;
    const int rows = static_cast<int>(least(kRowBlock, range_.m1 - m));
    const int cols = static_cast<int>(least(kRowBlock, range_.n1 - n));
    if (only_scaled_ && cols == kRowBlock) {
      pending.start(c, m, n, rows);
    } else {
      epilogue_(context_, c, kRowBlock, m, n, rows, cols);
    }
  }

  const Range range_;
  const GemmArgs& args_;
  const EpilogueContext& context_;
  const char* resident_;
  const int64_t first_row_;
  const Operand streamed_;
  EpilogueFn epilogue_;
  int64_t resident_panels_, streamed_panels_, blocks_;
  int64_t part_, share_, chunk_;  // resident and streamed panels of an item, k blocks
  bool only_scaled_;
};

// KernelImpl::decodes and run of an engine that may decode.
template <class Engine, class Decoder>
Decodes decodes_side(const GemmArgs& args) {
  const bool lhs = DecodedGemm<Engine, Decoder, Role::lhs>::takes(args);
  const bool rhs = DecodedGemm<Engine, Decoder, Role::rhs>::takes(args);
  // The longer side had better stream, so that the shorter one is what stays.
  if (lhs && (!rhs || args.lhs.rows > args.rhs.rows)) return Decodes::lhs;
  return rhs ? Decodes::rhs : Decodes::none;
}

template <class Engine, class Decoder>
Status run_or_decode(const Range& range, const void* lhs, const void* rhs,
                     const EpilogueContext& context, void* workspace) {
  if (lhs == nullptr) return DecodedGemm<Engine, Decoder, Role::lhs>::run(range, rhs, context);
  if (rhs == nullptr) return DecodedGemm<Engine, Decoder, Role::rhs>::run(range, lhs, context);
  return PanelGemm<Engine>::run(range, lhs, rhs, context, workspace);
}

}  // namespace te_mx
