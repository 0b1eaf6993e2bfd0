// Runs independent items on several threads, sharing the thread pool that torch already has.
#pragma once

#include <cstdint>
#include <type_traits>

namespace te_mx::cpu {

// Calls fn(ctx, item) for every item in [0, n_items), each exactly once, on at most `threads`
// threads of which the caller is one. Items are handed out by a counter, so what an item computes
// must not depend on who runs it. fn must not throw. Safe from several threads at once, from inside
// fn, and after fork().
void parallel_for(int threads, int64_t n_items, void (*fn)(void* ctx, int64_t item), void* ctx);

// The same for a callable taking the item.
template <class F>
void parallel_for(int threads, int64_t n_items, F&& body) {
  using Body = std::remove_reference_t<F>;
  parallel_for(
      threads, n_items, [](void* ctx, int64_t item) noexcept { (*static_cast<Body*>(ctx))(item); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace te_mx::cpu
