// An owned reference to a Python object. Everything here runs with the GIL held.
#pragma once

#include <Python.h>

#include <utility>

namespace tskernel {

class Object {
  public:
    Object() = default;
    static Object share(PyObject* object) { return Object(Py_NewRef(object)); }
    static Object take(PyObject* object) { return Object(object); }

    Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Object& operator=(Object&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    Object(const Object&) = delete;
    Object& operator=(const Object&) = delete;
    ~Object() { Py_XDECREF(object_); }

    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    explicit Object(PyObject* object) : object_(object) {}
    PyObject* object_ = nullptr;
};

}  // namespace tskernel
