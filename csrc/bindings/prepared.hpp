// A native call that is prepared but for what differs from run to run: in Python
//
//   call = native.prepared("quantize", QuantizeArgs(..), [("x_data", 0, 0), ..], 2)   once
//   number = call.run(tensor, stream)                                                  every time
//
// What differs is (field, number of the argument, what is added to it). An argument is a whole
// number, a tensor, which stands for its address, or None: 0, to which nothing is added. `run`
// gives what the call tells of itself, and the status of one that fails below zero.
#pragma once

#include <pybind11/stl.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "record.hpp"

namespace te_mx::bindings {

// The arguments of a run.
class Arguments {
 public:
  static constexpr size_t kMost = 64;

  // False with a Python error set.
  bool read(PyObject* const* given, Py_ssize_t count, size_t wanted) {
    if (static_cast<size_t>(count) != wanted) {
      PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd",
                   static_cast<Py_ssize_t>(wanted), count);
      return false;
    }
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!read(given[i], values_[i])) return false;
    return true;
  }

  uint64_t at(size_t number, int64_t offset) const {
    const uint64_t value = values_[number];
    return value == 0 ? 0 : value + static_cast<uint64_t>(offset);
  }

 private:
  static bool read(PyObject* given, uint64_t& value) {
    value = 0;
    if (given == Py_None) return true;
    if (PyLong_Check(given)) {
      value = as_unsigned(given);
    } else {
      static PyObject* const name = PyUnicode_InternFromString("data_ptr");
      PyObject* const address = PyObject_CallMethodNoArgs(given, name);
      if (address == nullptr) return false;
      value = as_unsigned(address);
      Py_DECREF(address);
    }
    return value != ~0ull || !PyErr_Occurred();
  }

  uint64_t values_[kMost];
};

// A field of a record that an argument fills.
struct Filled {
  int64_t at;  // bytes from the start of the record
  int width;
  size_t number;
  int64_t offset;

  void fill(void* record, const Arguments& arguments) const {
    char* const to = static_cast<char*>(record) + at;
    const uint64_t value = arguments.at(number, offset);
    if (width == 1) {
      *reinterpret_cast<bool*>(to) = value != 0;
    } else {
      std::memcpy(to, &value, static_cast<size_t>(width));  // low bytes first
    }
  }
};

// Raises ValueError for a field that there is not, or that no argument fills.
template <class Args>
Filled filled(const std::string& name, size_t number, int64_t offset, size_t count) {
  for (const Field& field : Record<Args>::kept())
    if (field.name == name && field.width != 0 && number < count)
      return {field.at, field.width, number, offset};
  throw py::value_error("no argument " + name);
}

class AnyCall {
 public:
  virtual ~AnyCall() = default;
  virtual PyObject* run(PyObject* const* given, Py_ssize_t count) = 0;
};

// A call takes a record and gives what it tells, or the status below zero.
template <class Args>
class Prepared : public AnyCall {
 public:
  using Call = int64_t (*)(const Args&);

  Prepared(Call call, const Args& plan, std::vector<Filled> places, size_t count)
      : call_(call), plan_(plan), places_(std::move(places)), count_(count) {}

  PyObject* run(PyObject* const* given, Py_ssize_t count) override {
    Arguments arguments;
    if (!arguments.read(given, count, count_)) return nullptr;
    Args args = plan_;  // another thread may run the same
    for (const Filled& place : places_) place.fill(&args, arguments);
    return PyLong_FromLongLong(call_(args));
  }

 private:
  Call call_;
  Args plan_;
  std::vector<Filled> places_;
  size_t count_;
};

namespace prepared {

using Given = std::vector<std::tuple<std::string, size_t, int64_t>>;

struct Known {
  std::string name;
  std::function<std::unique_ptr<AnyCall>(const py::object&, const Given&, size_t)> prepare;
};

// The calls of this module that can be prepared.
inline std::vector<Known>& all() {
  static std::vector<Known> known;
  return known;
}

template <class Args>
void add(const char* name, int64_t (*call)(const Args&)) {
  all().push_back({name, [call](const py::object& plan, const Given& given, size_t count) {
                     if (count > Arguments::kMost) throw py::value_error("too many arguments");
                     std::vector<Filled> places;
                     for (const auto& [field, number, offset] : given)
                       places.push_back(filled<Args>(field, number, offset, count));
                     return std::make_unique<Prepared<Args>>(call, record<Args>(plan),
                                                             std::move(places), count);
                   }});
}

struct Holder {
  PyObject ob_base;
  AnyCall* call;
};

inline PyTypeObject* type = nullptr;

inline PyObject* run(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return reinterpret_cast<Holder*>(self)->call->run(given, count);
}

inline void destroy(PyObject* self) {
  PyTypeObject* const of = Py_TYPE(self);
  delete reinterpret_cast<Holder*>(self)->call;
  of->tp_free(self);
  Py_DECREF(of);
}

inline py::object hold(std::unique_ptr<AnyCall> made) {
  PyObject* const holder = type->tp_alloc(type, 0);
  if (holder == nullptr) throw py::error_already_set();
  reinterpret_cast<Holder*>(holder)->call = made.release();
  return py::reinterpret_steal<py::object>(holder);
}

// NOTE: a type of CPython, as those of records: pybind11's calls take longer.
inline void add_to(py::module_& m) {
  static PyMethodDef methods[] = {
      {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run)), METH_FASTCALL,
       "Runs it; below zero the status of what failed."},
      {}};
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(&destroy)}, {Py_tp_methods, methods}, {0, nullptr}};
  static std::string name = m.attr("__name__").cast<std::string>() + ".Prepared";
  PyType_Spec spec{name.c_str(), static_cast<int>(sizeof(Holder)), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) throw py::error_already_set();
  m.def("prepared",
        [](const std::string& called, const py::object& plan, const Given& given, size_t count) {
          for (const Known& one : all())
            if (one.name == called) return hold(one.prepare(plan, given, count));
          throw py::value_error("no call that can be prepared: " + called);
        });
}

}  // namespace prepared

}  // namespace te_mx::bindings
