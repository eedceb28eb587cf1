// How the arguments of one call look, and the comparison with those of an earlier one.
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <string>
#include <vector>

#include "keys.h"
#include "object.h"

namespace tskernel {

constexpr size_t kMaxTensors = 24;
constexpr size_t kMaxSlots = 48;

// What an argument is, one letter each. All are passed to the kernel but those of the last kind.
enum class Kind : char {
    kTensor = 'T',
    kOptionalTensor = 'O',
    kBuffer = 'R',        // an optional tensor that the call returns
    kSize = 'N',          // an int >= 0 that no look covers
    kOptionalSize = 'M',  // the same, or None
    kOption = 'V',        // compared by value
    kFlag = 'X',          // compared by value, not passed on
};

inline bool is_tensor_kind(Kind kind) {
    return kind == Kind::kTensor || kind == Kind::kOptionalTensor || kind == Kind::kBuffer;
}

// One pass over a call's arguments.
struct Given {
    PyObject* objects[kMaxTensors];
    const at::TensorImpl* tensors[kMaxTensors];
    size_t count = 0;
    uint64_t present = 0;  // which slots hold a tensor

    // False where the call cannot be recognised at all. ``exact``: only torch.Tensor and Parameter count as tensors.
    bool read(const std::string& kinds, PyObject* const* arguments, bool exact) {
        for (size_t i = 0; i < kinds.size(); ++i) {
            const Kind kind = static_cast<Kind>(kinds[i]);
            PyObject* value = arguments[i];
            if (is_tensor_kind(kind)) {
                if (value == Py_None && kind != Kind::kTensor) continue;
                if (!add(value, exact)) return false;
                present |= uint64_t{1} << i;
            } else if (kind == Kind::kSize || kind == Kind::kOptionalSize) {
                if (value == Py_None && kind == Kind::kOptionalSize) continue;
                if (!is_size(value)) return false;
            }
        }
        return count > 0;
    }

  private:
    bool add(PyObject* value, bool exact) {
        if (!THPVariable_CheckExact(value) &&
            (exact || !PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject*>(THPVariableClass)))) {
            return false;
        }
        const at::Tensor& tensor = THPVariable_Unpack(value);
        if (!tensor.defined()) return false;
        objects[count] = value;
        tensors[count++] = tensor.unsafeGetTensorImpl();
        return true;
    }

    static bool is_size(PyObject* value) {
        if (!PyLong_CheckExact(value)) return false;
        int overflow = 0;
        return PyLong_AsLongLongAndOverflow(value, &overflow) >= 0 && overflow == 0;
    }
};

inline bool same_option(PyObject* a, PyObject* b) {
    if (a == b) return true;
    if (Py_TYPE(a) != Py_TYPE(b)) return false;  // True is not 1, and 1 is not 1.0
    if (PyFloat_Check(a)) {
        const double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
        return std::memcmp(&x, &y, sizeof x) == 0;
    }
    if (PyLong_Check(a)) {
        int over_a = 0, over_b = 0;
        const long long x = PyLong_AsLongLongAndOverflow(a, &over_a), y = PyLong_AsLongLongAndOverflow(b, &over_b);
        return over_a == 0 && over_b == 0 && x == y;
    }
    return PyUnicode_Check(a) && PyUnicode_Compare(a, b) == 0;
}

inline uint64_t option_hash(PyObject* value) {
    if (PyFloat_Check(value)) {
        const double number = PyFloat_AS_DOUBLE(value);
        uint64_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        return bits;
    }
    if (PyLong_Check(value)) {
        int overflow = 0;
        return static_cast<uint64_t>(PyLong_AsLongLongAndOverflow(value, &overflow));
    }
    if (PyUnicode_Check(value)) return static_cast<uint64_t>(PyObject_Hash(value));
    return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(value));
}

inline uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
    return hash ^ (hash >> 32);
}

// Type, dispatch keys under the modes of then, dtype, device, sizes and strides of one tensor.
class TensorLook {
  public:
    TensorLook(PyObject* object, const at::TensorImpl& tensor, const ThreadState& state)
        : type_(Object::share(reinterpret_cast<PyObject*>(Py_TYPE(object)))),
          keys_(state.applied(tensor)),
          dtype_(tensor.dtype()),
          device_(tensor.device()),
          sizes_(tensor.sizes().vec()),
          strides_(tensor.strides().vec()) {}

    bool matches(PyObject* object, const at::TensorImpl& tensor, const ThreadState& state) const {
        return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type_.get() && state.applied(tensor) == keys_ &&
               !tensor.has_symbolic_sizes_strides() && tensor.dtype() == dtype_ && equal(tensor.sizes(), sizes_) &&
               equal(tensor.strides(), strides_) && tensor.device() == device_ && !state.wants_gradient(tensor);
    }

  private:
    static bool equal(at::IntArrayRef a, const std::vector<int64_t>& b) {
        if (a.size() != b.size()) return false;
        for (size_t i = 0; i < b.size(); ++i) {
            if (a[i] != b[i]) return false;
        }
        return true;
    }

    Object type_;
    uint64_t keys_;
    caffe2::TypeMeta dtype_;
    c10::Device device_;
    std::vector<int64_t> sizes_, strides_;
};

// All that decides a call, as it was.
class Look {
  public:
    Look(const std::string& kinds, PyObject* const* arguments, const Given& given, const ThreadState& state)
        : present_(given.present) {
        for (size_t i = 0; i < given.count; ++i) {
            tensors_.emplace_back(given.objects[i], *given.tensors[i], state);
            for (size_t j = 0; j < i; ++j) twins_.push_back(given.objects[i] == given.objects[j]);
        }
        for (size_t i = 0; i < kinds.size(); ++i) {
            const Kind kind = static_cast<Kind>(kinds[i]);
            if (kind == Kind::kOption || kind == Kind::kFlag) options_.emplace_back(i, Object::share(arguments[i]));
        }
    }

    bool matches(PyObject* const* arguments, const Given& given, const ThreadState& state) const {
        if (given.present != present_) return false;
        for (size_t i = 0; i < given.count; ++i) {
            if (!tensors_[i].matches(given.objects[i], *given.tensors[i], state)) return false;
        }
        // Whether two arguments are one and the same tensor is something a kernel may ask.
        for (size_t i = 1, k = 0; i < given.count; ++i) {
            for (size_t j = 0; j < i; ++j, ++k) {
                if ((given.objects[i] == given.objects[j]) != twins_[k]) return false;
            }
        }
        for (const auto& [slot, value] : options_) {
            if (!same_option(arguments[slot], value.get())) return false;
        }
        return true;
    }

    // Where among the looks to find one: not all that ``matches`` compares, and equal where it would say yes.
    static uint64_t hash(const std::string& kinds, PyObject* const* arguments, const Given& given) {
        uint64_t hash = given.present;
        for (size_t i = 0; i < given.count; ++i) {
            if (given.tensors[i]->has_symbolic_sizes_strides()) continue;
            for (int64_t size : given.tensors[i]->sizes()) hash = mix(hash, static_cast<uint64_t>(size));
            for (int64_t stride : given.tensors[i]->strides()) hash = mix(hash, static_cast<uint64_t>(stride));
        }
        for (size_t i = 0; i < kinds.size(); ++i) {
            const Kind kind = static_cast<Kind>(kinds[i]);
            if (kind == Kind::kOption || kind == Kind::kFlag) hash = mix(hash, option_hash(arguments[i]));
        }
        return hash;
    }

  private:
    uint64_t present_;
    std::vector<TensorLook> tensors_;
    std::vector<char> twins_;
    std::vector<std::pair<size_t, Object>> options_;
};

}  // namespace tskernel
