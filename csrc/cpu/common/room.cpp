#include "common/room.h"

#include <cstdlib>
#include <memory>
#include <vector>

namespace te_mx::cpu {
namespace {

struct Free {
  void operator()(void* at) const { std::free(at); }
};

struct Block {
  std::unique_ptr<void, Free> at;
  size_t bytes = 0;
};

// One block for each room inside of another: a few.
struct Blocks {
  std::vector<Block> held;
  size_t used = 0;
};

Blocks& mine() {
  static thread_local Blocks blocks;
  return blocks;
}

}  // namespace

Room::Room(size_t bytes) {
  Blocks& blocks = mine();
  if (blocks.used == blocks.held.size()) blocks.held.emplace_back();
  Block& block = blocks.held[blocks.used++];
  if (block.bytes < bytes) {
    const size_t whole = (bytes + 63) / 64 * 64;
    block.at.reset(std::aligned_alloc(64, whole));
    if (!block.at) std::abort();  // as a stack that ends would
    block.bytes = whole;
  }
  at_ = block.at.get();
}

Room::~Room() { --mine().used; }

}  // namespace te_mx::cpu
