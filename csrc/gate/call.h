// A torch operator called without Python: what a native kernel binds itself to.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "look.h"

namespace tskernel {

// Where an operator's argument comes from: a slot of the call, an output, or a value that every such call has.
struct Source {
    enum class From : char { kTensor, kSize, kOutput, kConstant } from;
    size_t index = 0;
    c10::IValue constant;
};

class Call {
  public:
    // None where the operator is not registered, returns something, or takes other arguments than ``sources``: ints for
    // slots, -1 - i for output i, and 1-tuples for constants; those at the end may be left at their defaults.
    static std::optional<Call> bind(const char* name, PyObject* sources, const std::string& kinds, PyObject* slots) {
        const auto handle = c10::Dispatcher::singleton().findSchema({name, ""});
        if (!handle || !handle->schema().returns().empty()) return std::nullopt;
        const auto& parameters = handle->schema().arguments();
        const auto given = static_cast<size_t>(PyTuple_GET_SIZE(sources));
        if (given > parameters.size()) return std::nullopt;
        Call call(*handle);
        for (size_t i = given; i < parameters.size(); ++i) {
            if (!parameters[i].default_value()) return std::nullopt;
        }
        for (size_t i = 0; i < given; ++i) {
            auto source = read(PyTuple_GET_ITEM(sources, i), *parameters[i].type(), kinds, slots);
            if (!source) return std::nullopt;
            call.sources_.push_back(*std::move(source));
        }
        for (size_t i = given; i < parameters.size(); ++i) {
            call.sources_.push_back({Source::From::kConstant, 0, *parameters[i].default_value()});
        }
        return call;
    }

    size_t outputs() const {
        size_t count = 0;
        for (const Source& s : sources_)
            count = s.from == Source::From::kOutput && s.index >= count ? s.index + 1 : count;
        return count;
    }

    void run(PyObject* const* slots, const at::Tensor* outputs) const {
        torch::jit::Stack stack;
        stack.reserve(sources_.size());
        for (const Source& s : sources_) {
            switch (s.from) {
                case Source::From::kTensor:
                    if (slots[s.index] == Py_None) {
                        stack.emplace_back();
                    } else {
                        stack.emplace_back(THPVariable_Unpack(slots[s.index]));
                    }
                    break;
                case Source::From::kSize:
                    if (slots[s.index] == Py_None) {
                        stack.emplace_back();
                    } else {
                        stack.emplace_back(static_cast<int64_t>(PyLong_AsLongLong(slots[s.index])));
                    }
                    break;
                case Source::From::kOutput:
                    stack.emplace_back(outputs[s.index]);
                    break;
                case Source::From::kConstant:
                    stack.push_back(s.constant);
                    break;
            }
        }
        const WithoutGil released;
        handle_.callBoxed(stack);
    }

  private:
    class WithoutGil {
      public:
        WithoutGil() : state_(PyEval_SaveThread()) {}
        ~WithoutGil() { PyEval_RestoreThread(state_); }
        WithoutGil(const WithoutGil&) = delete;
        WithoutGil& operator=(const WithoutGil&) = delete;

      private:
        PyThreadState* state_;
    };

    explicit Call(c10::OperatorHandle handle) : handle_(std::move(handle)) {}

    static std::optional<Source> read(PyObject* item, const c10::Type& type, const std::string& kinds,
                                      PyObject* slots) {
        if (PyTuple_Check(item)) return constant(PyTuple_GET_ITEM(item, 0), type);
        const long long index = PyLong_AsLongLong(item);
        if (index < 0) return Source{Source::From::kOutput, static_cast<size_t>(-1 - index), {}};
        const size_t slot = static_cast<size_t>(index);
        if (slot >= kinds.size()) return std::nullopt;
        const Kind kind = static_cast<Kind>(kinds[slot]);
        if (is_tensor_kind(kind)) return Source{Source::From::kTensor, slot, {}};
        if (kind == Kind::kSize || kind == Kind::kOptionalSize) return Source{Source::From::kSize, slot, {}};
        return constant(PyTuple_GET_ITEM(slots, slot), type);  // a look covers it: it is the same whenever this is run
    }

    static std::optional<Source> constant(PyObject* value, const c10::Type& type) {
        auto converted = convert(value, type);
        if (!converted) return std::nullopt;
        return Source{Source::From::kConstant, 0, *std::move(converted)};
    }

    static std::optional<c10::IValue> convert(PyObject* value, const c10::Type& type) {
        if (type.kind() == c10::TypeKind::OptionalType) {
            if (value == Py_None) return c10::IValue();
            return convert(value, *type.containedTypes()[0]);
        }
        switch (type.kind()) {
            case c10::TypeKind::FloatType:
                if (PyFloat_Check(value)) return c10::IValue(PyFloat_AS_DOUBLE(value));
                if (PyLong_CheckExact(value)) return c10::IValue(PyLong_AsDouble(value));
                return std::nullopt;
            case c10::TypeKind::IntType:
            case c10::TypeKind::SymIntType:
                if (THPDtype_Check(value)) {
                    return c10::IValue(static_cast<int64_t>(reinterpret_cast<THPDtype*>(value)->scalar_type));
                }
                if (PyLong_CheckExact(value)) return c10::IValue(static_cast<int64_t>(PyLong_AsLongLong(value)));
                return std::nullopt;
            case c10::TypeKind::BoolType:
                if (PyBool_Check(value)) return c10::IValue(value == Py_True);
                return std::nullopt;
            case c10::TypeKind::StringType:
                if (PyUnicode_Check(value)) return c10::IValue(std::string(PyUnicode_AsUTF8(value)));
                return std::nullopt;
            default:
                return std::nullopt;
        }
    }

    c10::OperatorHandle handle_;
    std::vector<Source> sources_;
};

}  // namespace tskernel
