// A plain struct as a Python class with named fields: numbers and enumerators as int, addresses as
// int, flags as bool. Prepared once and copied, a record is a prepared call:
//
//   plan = GemmArgs(lhs=Operand(rows=8, k=64), rhs=...)          once
//   status = gemm(plan.copy(lhs_codes=address, out=address))     every time
//
// The fields of a part can be reached from the whole: GemmArgs().lhs_codes is GemmArgs().lhs.codes.
//
// NOTE: these are types of CPython, with its descriptors, and not classes of pybind11, whose
// properties take four times as long: a call of a small problem is mostly this.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "mxtile/mx/float_mode.hpp"
#include "te_mx/fused.h"
#include "te_mx/gemm.h"
#include "te_mx/linear.h"
#include "te_mx/moe.h"
#include "te_mx/quantize.h"
#include "te_mx/sm90_decode.h"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::bindings {

namespace py = pybind11;

template <class T, class... Ts>
inline constexpr bool one_of = (std::is_same_v<T, Ts> || ...);
template <class T>
concept AnyRecord = one_of<T, Matrix, Scaling, Operand, Groups, Execution, OperandOut, QuantizeOut,
                           QuantizeArgs, GroupedQuantizeArgs, DequantizeArgs, PackArgs, RowSumsArgs,
                           Epilogue, GemmArgs, GroupedGemmArgs, NormArgs, NormGradArgs, ActArgs,
                           NormRowsArgs, LinearArgs, Routing, MoeGemmArgs, MoeAlignArgs,
                           MoeCombineArgs, sm90::DecodeArgs, sm90::Nvfp4Args, sm90::Nvfp4Side,
                           sm90::Nvfp4QuantizeArgs, sm90::Nvfp4FinishArgs, sm90::Nvfp4MultiplyArgs>;

// A Python object that holds a struct, or shows a part of the one that `owner` holds.
template <class T>
struct Box {
  PyObject ob_base;
  T* at;
  PyObject* owner;
  T own;
};

// The Python type of a struct; null before it exists.
template <class T>
inline PyTypeObject* record_type = nullptr;

template <class T>
T& unbox(PyObject* box) {
  return *reinterpret_cast<Box<T>*>(box)->at;
}

// The record that a Python object is; raises TypeError for another.
template <class T>
T& record(const py::handle& object) {
  if (!PyObject_TypeCheck(object.ptr(), record_type<T>))
    throw py::type_error(std::string("expected ") + record_type<T>->tp_name);
  return unbox<T>(object.ptr());
}

template <class T>
PyObject* new_box(PyTypeObject* type, const T& value) {
  auto* const box = reinterpret_cast<Box<T>*>(type->tp_alloc(type, 0));
  if (box == nullptr) return nullptr;
  box->at = new (&box->own) T(value);
  return reinterpret_cast<PyObject*>(box);
}

// NOTE: of a number with more than 30 bits, as addresses are, CPython's functions for long long put
// bytes together, which takes four times as long as those for long.
inline unsigned long long as_unsigned(PyObject* value) {
  if constexpr (sizeof(long) == sizeof(long long)) return PyLong_AsUnsignedLong(value);
  return PyLong_AsUnsignedLongLong(value);
}
inline long long as_signed(PyObject* value) {
  if constexpr (sizeof(long) == sizeof(long long)) return PyLong_AsLong(value);
  return PyLong_AsLongLong(value);
}

// How a field is read into Python and written from there; false with a Python error set.
template <class V>
struct Value {
  static PyObject* read(void* at, PyObject*) {
    const V v = *static_cast<const V*>(at);
    if constexpr (std::is_pointer_v<V>) {
      return PyLong_FromUnsignedLongLong(reinterpret_cast<uintptr_t>(v));
    } else if constexpr (std::is_same_v<V, bool>) {
      return PyBool_FromLong(v);
    } else if constexpr (std::is_floating_point_v<V>) {
      return PyFloat_FromDouble(v);
    } else {
      return PyLong_FromLongLong(static_cast<int64_t>(v));
    }
  }

  static bool write(void* at, PyObject* value) {
    V& to = *static_cast<V*>(at);
    if constexpr (std::is_pointer_v<V>) {
      const unsigned long long v = as_unsigned(value);
      if (v == ~0ull && PyErr_Occurred()) return false;
      to = reinterpret_cast<V>(static_cast<uintptr_t>(v));
    } else if constexpr (std::is_same_v<V, bool>) {
      const int v = PyObject_IsTrue(value);
      if (v < 0) return false;
      to = v != 0;
    } else if constexpr (std::is_floating_point_v<V>) {
      const double v = PyFloat_AsDouble(value);
      if (v == -1.0 && PyErr_Occurred()) return false;
      // A thread that flushes denormals would round a small number to zero. The compiler does not
      // know of that: what is volatile stays where it is.
      const mxtile::mx::KeepDenormals keep_denormals;
      volatile double given = v;
      volatile V made = static_cast<V>(given);
      to = made;
    } else {
      static_assert(sizeof(V) == 4 || sizeof(V) == 8);
      const long long v = as_signed(value);
      if (v == -1 && PyErr_Occurred()) return false;
      if (sizeof(V) == 4 && v != static_cast<int32_t>(v)) {
        PyErr_Format(PyExc_OverflowError, "%lld does not fit in 32 bits", v);
        return false;
      }
      to = static_cast<V>(v);
    }
    return true;
  }
};

// A part that is a record itself: shown where it lies, written by value.
template <class V>
struct Part {
  static PyObject* read(void* at, PyObject* whole) {
    auto* const box = reinterpret_cast<Box<V>*>(record_type<V>->tp_alloc(record_type<V>, 0));
    if (box == nullptr) return nullptr;
    box->at = static_cast<V*>(at);
    Py_INCREF(whole);
    box->owner = whole;
    return reinterpret_cast<PyObject*>(box);
  }
  static bool write(void* at, PyObject* value) {
    if (!PyObject_TypeCheck(value, record_type<V>)) {
      PyErr_Format(PyExc_TypeError, "expected %s, got %s", record_type<V>->tp_name,
                   Py_TYPE(value)->tp_name);
      return false;
    }
    *static_cast<V*>(at) = unbox<V>(value);
    return true;
  }
};

struct Field {
  std::string name;
  int64_t at;  // bytes from the start of the record
  bool part;
  int width;  // bytes of an address, a whole number or a flag; 0 for others
  PyObject* (*read)(void* at, PyObject* whole);
  bool (*write)(void* at, PyObject* value);
};

// Describes a struct: Record<T>().field(..).part(..).add_to(module, name).
template <AnyRecord T>
class Record {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  template <class V>
  Record& field(const char* name, V T::* member) {
    constexpr int kWidth = std::is_floating_point_v<V> ? 0 : sizeof(V);
    fields_.push_back({name, offset(member), false, kWidth, &Value<V>::read, &Value<V>::write});
    return *this;
  }

  // A part, and its fields under their names behind `prefix`.
  template <class V>
  Record& part(const char* name, V T::* member, const std::string& prefix) {
    fields_.push_back({name, offset(member), true, 0, &Part<V>::read, &Part<V>::write});
    for (Field inner : Record<V>::kept()) {
      inner.name = prefix + inner.name;
      inner.at += offset(member);
      fields_.push_back(inner);
    }
    return *this;
  }

  void add_to(py::module_& m, const char* name) {
    // What the type points to lives as long as the process.
    kept() = fields_;
    static std::string full_name;
    static std::vector<PyGetSetDef> descriptors;
    full_name = m.attr("__name__").cast<std::string>() + "." + name;
    for (Field& field : kept())
      descriptors.push_back({field.name.c_str(), &get, &set, nullptr, &field});
    descriptors.push_back({});
    static PyMethodDef methods[] = {
        {"copy", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&copy)),
         METH_FASTCALL | METH_KEYWORDS, "A copy, with the named fields replaced."},
        {}};
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
                           {Py_tp_repr, reinterpret_cast<void*>(&print)},
                           {Py_tp_getset, descriptors.data()},
                           {Py_tp_methods, methods},
                           {0, nullptr}};
    // NOTE: without tp_new there is one way to a record, and no object without one inside.
    PyType_Spec spec{full_name.c_str(), static_cast<int>(sizeof(Box<T>)), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    py::object type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
    if (!type) throw py::error_already_set();
    m.attr(name) = type;
    record_type<T> = reinterpret_cast<PyTypeObject*>(type.release().ptr());
    record_type<T>->tp_vectorcall = &construct;
  }

  static std::vector<Field>& kept() {
    static std::vector<Field> fields;
    return fields;
  }

 private:
  template <class V>
  static int64_t offset(V T::* member) {
    static T probe{};
    return reinterpret_cast<char*>(&(probe.*member)) - reinterpret_cast<char*>(&probe);
  }

  static char* bytes(PyObject* self) { return reinterpret_cast<char*>(&unbox<T>(self)); }

  static PyObject* get(PyObject* self, void* closure) {
    const Field& field = *static_cast<const Field*>(closure);
    return field.read(bytes(self) + field.at, self);
  }

  static int set(PyObject* self, PyObject* value, void* closure) {
    const Field& field = *static_cast<const Field*>(closure);
    if (value == nullptr) {
      PyErr_Format(PyExc_AttributeError, "field %s cannot be deleted", field.name.c_str());
      return -1;
    }
    return field.write(bytes(self) + field.at, value) ? 0 : -1;
  }

  // The fields of names, a tuple that the compiler of Python made for one place in the code: what
  // was found for it stays known. Null, with an error set, for a name that no field has.
  static const std::vector<const Field*>* find(PyObject* names) {
    struct Place {
      PyObject* names = nullptr;
      std::vector<const Field*> fields;
    };
    static Place places[16];
    static unsigned next = 0;
    for (const Place& place : places) {
      if (place.names == names) return &place.fields;
    }
    std::vector<const Field*> found;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
      PyObject* const name = PyTuple_GET_ITEM(names, i);
      for (const Field& field : kept()) {
        if (PyUnicode_CompareWithASCIIString(name, field.name.c_str()) == 0)
          found.push_back(&field);
      }
      if (static_cast<Py_ssize_t>(found.size()) <= i) {
        PyErr_Format(PyExc_AttributeError, "%s has no field %U", record_type<T>->tp_name, name);
        return nullptr;
      }
    }
    Place& place = places[next++ % std::size(places)];
    Py_INCREF(names);
    Py_XDECREF(place.names);
    place.names = names, place.fields = std::move(found);
    return &place.fields;
  }

  // A new record that differs from `from` in the fields of a vectorcall.
  static PyObject* create(const T& from, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    if (count != 0) {
      PyErr_Format(PyExc_TypeError, "%s takes fields by name", record_type<T>->tp_name);
      return nullptr;
    }
    PyObject* const result = new_box<T>(record_type<T>, from);
    if (result == nullptr || names == nullptr) return result;
    const std::vector<const Field*>* const named = find(names);
    bool ok = named != nullptr;
    for (size_t i = 0; ok && i < named->size(); ++i)
      ok = (*named)[i]->write(bytes(result) + (*named)[i]->at, args[i]);
    if (ok) return result;
    Py_DECREF(result);
    return nullptr;
  }

  static PyObject* construct(PyObject*, PyObject* const* args, size_t count, PyObject* names) {
    return create(T{}, args, PyVectorcall_NARGS(count), names);
  }

  static PyObject* copy(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    return create(unbox<T>(self), args, count, names);
  }

  static void destroy(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    Py_XDECREF(reinterpret_cast<Box<T>*>(self)->owner);
    type->tp_free(self);
    Py_DECREF(type);
  }

  // The fields that differ from a fresh record.
  static PyObject* print(PyObject* self) {
    try {
      T fresh{};
      std::string text;
      for (const Field& field : kept()) {
        if (field.part) continue;
        const auto value_in = [&](void* record) {
          return py::reinterpret_steal<py::object>(
              field.read(static_cast<char*>(record) + field.at, nullptr));
        };
        const py::object value = value_in(bytes(self));
        if (value.equal(value_in(&fresh))) continue;
        text += (text.empty() ? "" : ", ") + field.name + "=" + std::string(py::repr(value));
      }
      const std::string name = py::type::of(self).attr("__name__").cast<std::string>();
      return py::str(name + "(" + text + ")").release().ptr();
    } catch (py::error_already_set& error) {
      error.restore();
      return nullptr;
    }
  }

  std::vector<Field> fields_;
};

// What both modules have: records, what numbers of theirs mean, and choices that need no device.
void bind_types(py::module_& m);
void bind_quantize_records(py::module_& m);
void bind_gemm_records(py::module_& m);
void bind_fused_records(py::module_& m);
void bind_linear_records(py::module_& m);
// {name: (codes, scales, end)} of the operands, and bytes of the two workspaces.
py::dict as_dict(const LinearOffsets& offsets);
void bind_moe_records(py::module_& m);
void bind_sm90_choice(py::module_& m);
// The compiler of a module, for reports.
#ifdef __clang__
inline constexpr const char* kCompiler = "clang " __clang_version__;
#else
inline constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

inline void bind_common(py::module_& m) {
  m.attr("COMPILER") = kCompiler;
  bind_types(m);
  bind_quantize_records(m);
  bind_gemm_records(m);
  bind_fused_records(m);
  bind_linear_records(m);
  bind_moe_records(m);
  bind_sm90_choice(m);
}

}  // namespace te_mx::bindings

// Records as arguments of functions that pybind11 binds.
template <te_mx::bindings::AnyRecord T>
class pybind11::detail::type_caster<T> {
 public:
  static constexpr auto name = const_name("record");
  template <class>
  using cast_op_type = T&;

  bool load(handle source, bool) {
    if (!PyObject_TypeCheck(source.ptr(), te_mx::bindings::record_type<T>)) return false;
    value_ = &te_mx::bindings::unbox<T>(source.ptr());
    return true;
  }
  operator T&() { return *value_; }

 private:
  T* value_ = nullptr;
};
