// The bf16 panel GEMM that decodes one side itself: when few panels of the other side stay in L2,
// every panel of this one is wanted once or twice, and packing it ahead would send twice its bytes
// through the third-level cache and back.
//
//   item             all or half of the resident panels x some streamed ones
//     streamed pair  decoded while the pair before is multiplied
//       resident panel, all of k
//
// The sums have the order and the bits of PanelGemm. Long k stays with PanelGemm, whose sums rest
// in memory: decoding cost more there than it saved.
#pragma once

#include "common/room.h"
#include "gemm/decode_bf16.hpp"
#include "gemm/gemm_bf16.hpp"

namespace te_mx::cpu {

// Engine: that of PanelGemm, and kMostBlocks, kResident, kMostParts, kNearBlocks.
template <class Engine, class Decoder, Role kStreamed>
class DecodedGemm {
 public:
  // Whether to decode this side.
  static bool takes(const GemmTask& args) {
    const StridedOperand& own = kStreamed == Role::lhs ? args.lhs : args.rhs;
    const StridedOperand& other = kStreamed == Role::lhs ? args.rhs : args.lhs;
    if (own.packed != nullptr) return false;
    // The bias gradient of kind operand reads panels of lhs.
    if (kStreamed == Role::lhs && args.bias_grad_kind == BiasGrad::operand) return false;
    const int64_t panels = ceil_div(other.rows, kRowBlock), blocks = ceil_div(own.k, kBlock);
    const int64_t fit = fit_of(blocks);
    if (blocks > Engine::kMostBlocks || fit < least(Engine::kResident, panels)) return false;
    return ceil_div(panels, fit) <= Engine::kMostParts;
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
    Work(PendingRows<Simd>& pending, Stream& stream) : pending_(pending), stream_(stream) {}

    TE_MX_MEMBER void begin(int64_t steps) { pending_.begin(steps); }
    TE_MX_MEMBER void step() {
      pending_.step();
      stream_.step();
    }

   private:
    PendingRows<Simd>& pending_;
    Stream& stream_;
  };

  DecodedGemm(const Range& range, const char* resident, const EpilogueContext& context)
      : range_(range),
        args_(*context.args),
        context_(context),
        resident_(resident),
        first_row_(kLhs ? range.m0 : range.n0),
        streamed_(
            part_of_rows(kLhs ? args_.lhs : args_.rhs, first_row_, kLhs ? range.m1 : range.n1)),
        epilogue_(epilogue_for(isa_current())) {
    const int64_t lhs_panels = ceil_div(range.m1 - range.m0, kRowBlock);
    const int64_t rhs_panels = ceil_div(range.n1 - range.n0, kRowBlock);
    resident_panels_ = kLhs ? rhs_panels : lhs_panels;
    streamed_panels_ = kLhs ? lhs_panels : rhs_panels;
    blocks_ = ceil_div(args_.lhs.k, kBlock);
    normal_ = normal_powers<Simd>(context, range);
    part_ = even_part(resident_panels_, fit_of(blocks_));
    share_ = round_up(streamed_panels_, kPair);
    while (share_ > kPair && items() < Engine::kItems * args_.threads) {
      share_ = round_up((share_ + 1) / 2, kPair);
    }
  }

  // Resident panels that L2 has room for.
  static int64_t fit_of(int64_t blocks) { return Engine::kWholeBytes / (blocks * kStepBytes); }

  static int64_t even_part(int64_t whole, int64_t most) {
    return ceil_div(whole, ceil_div(whole, most));
  }
  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  int64_t items() const {
    return ceil_div(resident_panels_, part_) * ceil_div(streamed_panels_, share_);
  }

  struct alignas(64) Buffers {
    uint16_t decoded[2][Stream::kWords];
    float sums[2][kBlockFloats];  // one is summed and one stored
  };

  void run_item(int64_t first_resident, int64_t begin) const {
    const InRoom<Buffers> buffers;
    auto& decoded = buffers->decoded;
    auto& sums = buffers->sums;
    const int64_t part = least(part_, resident_panels_ - first_resident);
    const int64_t end = least(begin + share_, streamed_panels_);
    Engine engine(args_.lhs.k);
    PendingRows<Simd> pending(context_, normal_);
    Stream stream(streamed_, (kLhs ? context_.lhs_exp : context_.rhs_exp) + first_row_);
    start(stream, begin, end, decoded[0], 1);
    int64_t turn = 0, block_turn = 0;
    for (int64_t panel = begin; panel < end; panel += kPair, turn ^= 1) {
      stream.finish();
      const int64_t panels = least(kPair, end - panel);
      if (panel + kPair < end) {
        start(stream, panel + kPair, end, decoded[turn ^ 1], panels * part * blocks_);
      }
      for (int64_t j = 0; j < panels; ++j) {
        const char* own = reinterpret_cast<const char*>(decoded[turn]) + j * blocks_ * kStepBytes;
        for (int64_t i = first_resident; i < first_resident + part; ++i) {
          float* c = sums[block_turn ^= 1];
          const Block block = block_at(i, panel + j);
          if (pends(block)) pending.expect(block.m, block.n, block.rows);
          Work work(pending, stream);
          multiply(engine, own, i, block.rows, c, work);
          pending.finish();
          put(pending, c, block);
        }
      }
    }
    pending.finish();
    pending.fence();
  }

  void start(Stream& stream, int64_t panel, int64_t end, uint16_t* to, int64_t steps) const {
    const int64_t bytes = kPair * kRowBlock * streamed_.code_row_stride;
    stream.start(panel, least(kPair, end - panel), blocks_, to, steps,
                 panel + kPair < end ? bytes : 0);
  }

  // Of D.
  struct Block {
    int64_t m, n;
    int rows, cols;
  };
  Block block_at(int64_t resident, int64_t streamed) const {
    const int64_t m = range_.m0 + (kLhs ? streamed : resident) * kRowBlock;
    const int64_t n = range_.n0 + (kLhs ? resident : streamed) * kRowBlock;
    return {m, n, static_cast<int>(least(kRowBlock, range_.m1 - m)),
            static_cast<int>(least(kRowBlock, range_.n1 - n))};
  }
  static bool pends(const Block& block) { return block.cols == kRowBlock; }

  void multiply(Engine& engine, const char* own, int64_t resident, int rows, float* c,
                Work& work) const {
    const char* other = resident_ + resident * blocks_ * kStepBytes;
    const bool near = blocks_ <= Engine::kNearBlocks;
    const Reuse reuse{!near ? Reuse::none : kLhs ? Reuse::lhs : Reuse::rhs, blocks_};
    engine.block(kLhs ? own : other, kLhs ? other : own, blocks_, rows, c, true, reuse, work);
  }

  // NOTE: inlined, gcc 12 warns of bounds that no loop here passes.
  [[gnu::noinline]] void put(PendingRows<Simd>& pending, float* c, const Block& block) const {
    if (pends(block)) {
      pending.start(c, block.m, block.n, block.rows);
    } else {
      epilogue_(context_, c, kRowBlock, block.m, block.n, block.rows, block.cols);
    }
  }

  const Range range_;
  const GemmTask& args_;
  const EpilogueContext& context_;
  const char* resident_;
  const int64_t first_row_;
  const StridedOperand streamed_;
  EpilogueFn epilogue_;
  int64_t resident_panels_, streamed_panels_, blocks_;
  int64_t part_, share_;  // resident and streamed panels of an item
  bool normal_;
};

// KernelImpl::decodes and run of an engine that may decode.
template <class Engine, class Decoder>
Decodes decodes_side(const GemmTask& args) {
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

}  // namespace te_mx::cpu
