// Native calls that run one after the other, made once for all calls of one size: in Python
//
//   steps = [("quantize", (QuantizeArgs(..),), [(0, "x_data", 1, 0), ..]), ("gemm", ..), ..]
//   sequence = native.sequence(steps, device, 3)       once
//   status = sequence.run(stream, address, tensor)     every time
//
// A step is the name of a call, its records, and what differs from run to run: (number of the
// record, field, number of the argument, what is added to it). Argument 0 is the stream. A tensor
// stands for its address, None for 0. `run` ends at the first call that fails, with its status.
#pragma once

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "common/device.h"
#include "record.hpp"

namespace te_mx::bindings {

// A call that sequences may contain.
struct Callable {
  std::string name;
  // Moves records into memory of their own; raises TypeError for others than the call takes.
  std::function<std::shared_ptr<void>(const py::tuple&)> keep;
  std::function<const Field*(const std::string&)> field;
  std::function<void*(void*, size_t)> record;  // number i of what was kept
  Status (*run)(void*);
};

class Sequence {
 public:
  using Argument = std::tuple<size_t, std::string, size_t, int64_t>;

  Sequence(int device, size_t arguments) : device_(device), count_(arguments) {
    if (count_ > kMost) throw py::value_error("too many arguments");
  }

  void add(const Callable& call, const py::tuple& records, const std::vector<Argument>& arguments) {
    Step step{call.run, call.keep(records)};
    for (const auto& [which, name, number, offset] : arguments) {
      const Field* const field = call.field(name);
      if (field == nullptr || field->width == 0 || which >= py::len(records) || number >= count_)
        throw py::value_error(call.name + " has no argument " + name);
      char* const at = static_cast<char*>(call.record(step.records.get(), which)) + field->at;
      places_.push_back({at, field->width, number, offset});
    }
    steps_.push_back(std::move(step));
  }

  PyObject* run(PyObject* const* arguments, Py_ssize_t count) {
    uint64_t values[kMost];
    if (static_cast<size_t>(count) != count_) {
      PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd",
                   static_cast<Py_ssize_t>(count_), count);
      return nullptr;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!value_of(arguments[i], values[i])) return nullptr;
    }
    for (const Place& place : places_) {
      const uint64_t value = values[place.number] + static_cast<uint64_t>(place.offset);
      if (place.width == 1) {
        *reinterpret_cast<bool*>(place.at) = value != 0;
      } else {
        std::memcpy(place.at, &value, sizeof value);
      }
    }
    const sm90::DeviceScope scope(device_);
    for (const Step& step : steps_) {
      const Status status = step.run(step.records.get());
      if (status != Status::ok) return PyLong_FromLong(static_cast<int32_t>(status));
    }
    return PyLong_FromLong(0);
  }

 private:
  // False with a Python error set.
  static bool value_of(PyObject* argument, uint64_t& value) {
    value = 0;
    if (argument == Py_None) return true;
    if (PyLong_Check(argument)) {
      value = as_unsigned(argument);
    } else {
      static PyObject* const name = PyUnicode_InternFromString("data_ptr");
      PyObject* const address = PyObject_CallMethodNoArgs(argument, name);
      if (address == nullptr) return false;
      value = as_unsigned(address);
      Py_DECREF(address);
    }
    return value != ~0ull || !PyErr_Occurred();
  }

  static constexpr size_t kMost = 64;
  struct Step {
    Status (*run)(void*);
    std::shared_ptr<void> records;
  };
  struct Place {
    char* at;
    int width;  // 8 bytes, or a flag
    size_t number;
    int64_t offset;
  };

  int device_;
  size_t count_;
  std::vector<Step> steps_;
  std::vector<Place> places_;
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
       [](const std::string& wanted) -> const Field* {
         for (const Field& field : Record<Args>::kept()) {
           if (field.name == wanted) return &field;
         }
         return nullptr;
       },
       [](void* kept, size_t i) -> void* { return &(*static_cast<Records*>(kept))[i]; },
       [](void* kept) { return Run{}(*static_cast<Records*>(kept)); }});
}

inline PyTypeObject* type = nullptr;
struct Holder {
  PyObject ob_base;
  Sequence* sequence;
};

inline PyObject* run(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return reinterpret_cast<Holder*>(self)->sequence->run(arguments, count);
}

inline void destroy(PyObject* self) {
  PyTypeObject* const of = Py_TYPE(self);
  delete reinterpret_cast<Holder*>(self)->sequence;
  of->tp_free(self);
  Py_DECREF(of);
}

// NOTE: a type of CPython, as those of records: pybind11's calls take longer.
inline void add_to(py::module_& m) {
  static PyMethodDef methods[] = {
      {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run)), METH_FASTCALL,
       "Runs all calls; the status of the first that fails, or 0."},
      {}};
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(&destroy)}, {Py_tp_methods, methods}, {0, nullptr}};
  static std::string name = m.attr("__name__").cast<std::string>() + ".Sequence";
  PyType_Spec spec{name.c_str(), static_cast<int>(sizeof(Holder)), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) throw py::error_already_set();
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
    PyObject* const holder = type->tp_alloc(type, 0);
    if (holder == nullptr) throw py::error_already_set();
    reinterpret_cast<Holder*>(holder)->sequence = made.release();
    return py::reinterpret_steal<py::object>(holder);
  });
}

}  // namespace sequences

}  // namespace te_mx::bindings
