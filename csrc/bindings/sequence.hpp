// Native calls that run one after the other, made once for all calls of one size: in Python
//
//   steps = [("quantize", (QuantizeArgs(..),), [(0, "x_data", 1, 0), ..]), ("gemm", ..), ..]
//   sequence = native.sequence(steps, device, 3)       once
//   status = sequence.run(stream, address, tensor)     every time
//
// A step is the name of a call, its records, and what differs from run to run, with the number of
// the record before it, as of prepared.hpp. Argument 0 is the stream. `run` ends at the first call
// that fails, with its status.
#pragma once

#include <array>

#include "common/device.h"
#include "prepared.hpp"

namespace te_mx::bindings {

// A call that sequences may contain.
struct Callable {
  std::string name;
  // Moves records into memory of their own; raises TypeError for others than the call takes.
  std::function<std::shared_ptr<void>(const py::tuple&)> keep;
  std::function<Filled(const std::string&, size_t, int64_t, size_t)> filled;
  std::function<void*(void*, size_t)> record;  // number i of what was kept
  Status (*run)(void*);
};

class Sequence : public AnyCall {
 public:
  using Argument = std::tuple<size_t, std::string, size_t, int64_t>;

  Sequence(int device, size_t arguments) : device_(device), count_(arguments) {
    if (count_ > Arguments::kMost) throw py::value_error("too many arguments");
  }

  void add(const Callable& call, const py::tuple& records, const std::vector<Argument>& arguments) {
    Step step{call.run, call.keep(records)};
    for (const auto& [which, name, number, offset] : arguments) {
      if (which >= py::len(records)) throw py::value_error(call.name + " has fewer records");
      places_.emplace_back(call.record(step.records.get(), which),
                           call.filled(name, number, offset, count_));
    }
    steps_.push_back(std::move(step));
  }

  PyObject* run(PyObject* const* given, Py_ssize_t count) override {
    Arguments arguments;
    if (!arguments.read(given, count, count_)) return nullptr;
    for (const auto& [record, place] : places_) place.fill(record, arguments);
    const sm90::DeviceScope scope(device_);
    for (const Step& step : steps_) {
      const Status status = step.run(step.records.get());
      if (status != Status::ok) return PyLong_FromLong(static_cast<int32_t>(status));
    }
    return PyLong_FromLong(0);
  }

 private:
  struct Step {
    Status (*run)(void*);
    std::shared_ptr<void> records;
  };

  int device_;
  size_t count_;
  std::vector<Step> steps_;
  std::vector<std::pair<void*, Filled>> places_;
};

namespace sequences {

// The calls of this module that sequences may contain.
inline std::vector<Callable>& callables() {
  static std::vector<Callable> all;
  return all;
}

template <class Args, size_t kRecords, class Run>
void add(const char* name, Run) {
  using Records = std::array<Args, kRecords>;
  callables().push_back(
      {name,
       [](const py::tuple& given) {
         if (given.size() != kRecords) throw py::value_error("a call takes its records");
         auto kept = std::make_shared<Records>();
         for (size_t i = 0; i < kRecords; ++i) (*kept)[i] = record<Args>(given[i]);
         return std::static_pointer_cast<void>(kept);
       },
       &filled<Args>,
       [](void* kept, size_t i) -> void* { return &(*static_cast<Records*>(kept))[i]; },
       [](void* kept) { return Run{}(*static_cast<Records*>(kept)); }});
}

inline void add_to(py::module_& m) {
  using Given = std::tuple<std::string, py::tuple, std::vector<Sequence::Argument>>;
  m.def("sequence", [](const std::vector<Given>& steps, int device, size_t count) {
    auto made = std::make_unique<Sequence>(device, count);
    for (const auto& [called, records, arguments] : steps) {
      const Callable* found = nullptr;
      for (const Callable& one : callables()) {
        if (one.name == called) found = &one;
      }
      if (found == nullptr) throw py::value_error("no call of sequences: " + called);
      made->add(*found, records, arguments);
    }
    return prepared::hold(std::move(made));
  });
}

}  // namespace sequences

}  // namespace te_mx::bindings
