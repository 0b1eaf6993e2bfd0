// Memory for the arrays of one item of work. Stacks of threads may be as small as 64 KB, and what
// calls an item is on them too: arrays of 16 KB and more lie here.
#pragma once

#include <cstddef>

namespace te_mx::cpu {

// `bytes` of this thread, at a multiple of 64, as long as this lives; not cleared. The thread keeps
// them for those that come next. Rooms end in the reverse of their order.
class Room {
 public:
  explicit Room(size_t bytes);
  ~Room();
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  [[gnu::always_inline]] void* get() const { return at_; }

 private:
  void* at_;
};

// An object in such memory, as `T object;` would make it. Inlined: files of several instruction
// sets have it.
template <class T>
class InRoom {
 public:
  [[gnu::always_inline]] InRoom() : room_(sizeof(T)) { static_assert(alignof(T) <= 64); }

  [[gnu::always_inline]] T& operator*() const { return *static_cast<T*>(room_.get()); }
  [[gnu::always_inline]] T* operator->() const { return static_cast<T*>(room_.get()); }

 private:
  Room room_;
};

}  // namespace te_mx::cpu
