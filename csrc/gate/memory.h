// The memory of one entry point: what served calls that looked like this one.
#pragma once

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <memory>
#include <unordered_map>

#include "call.h"
#include "look.h"

namespace tskernel {

constexpr size_t kLimit = 1024;  // looks that an entry point remembers
constexpr size_t kMaxOutputs = 4;
constexpr size_t kHot = 4;  // and those it tries first: a layer calls with few shapes

// What an output looks like. It follows from the look of the call, so that it need not be asked again.
struct Output {
    explicit Output(const at::Tensor& tensor)
        : sizes(tensor.sizes().vec()), strides(tensor.strides().vec()), options(tensor.options()) {}

    at::Tensor allocate() const { return at::empty_strided(sizes, strides, options); }

    std::vector<int64_t> sizes, strides;
    at::TensorOptions options;
};

// How to serve a call: a Python callable that takes the arguments and then the outputs, if they are to be allocated; or
// a torch operator in its place.
struct Plan {
    Object function;
    std::optional<Call> call;
    std::vector<Output> outputs;
    std::optional<c10::Device> device;  // to be the current one during the call
};

struct Entry {
    Look look;
    std::shared_ptr<const Plan> plan;  // shared: a kernel may make its own entry be forgotten
};

class Memory {
  public:
    Memory(std::string kinds, bool front, bool autocast_rule)
        : kinds_(std::move(kinds)), front_(front), autocast_rule_(autocast_rule) {
        while (passed_ < kinds_.size() && kinds_[passed_] != static_cast<char>(Kind::kFlag)) ++passed_;
        has_buffer_ = passed_ > 0 && kinds_[passed_ - 1] == static_cast<char>(Kind::kBuffer);
    }

    const std::string& kinds() const { return kinds_; }

    // The plan of a call that looks like an earlier one, or null.
    std::shared_ptr<const Plan> recall(PyObject* const* arguments) {
        if (front_ && at::impl::torch_function_mode_enabled()) return nullptr;
        Given given;
        if (!given.read(kinds_, arguments, front_)) return nullptr;
        const ThreadState state;
        for (size_t i = 0; i < hot_count_; ++i) {
            if (hot_[i]->look.matches(arguments, given, state)) return hot_[i]->plan;
        }
        if (entries_.size() <= hot_count_) return nullptr;
        auto [first, last] = entries_.equal_range(Look::hash(kinds_, arguments, given));
        for (; first != last; ++first) {
            if (!first->second->look.matches(arguments, given, state)) continue;
            heat(first->second.get());
            return first->second->plan;
        }
        return nullptr;
    }

    // False where such a call cannot be recognised.
    bool remember(PyObject* const* arguments, Plan plan) {
        Given given;
        if (!given.read(kinds_, arguments, front_)) return false;
        const ThreadState state;
        for (size_t i = 0; i < given.count; ++i) {
            const at::TensorImpl& tensor = *given.tensors[i];
            if (tensor.has_symbolic_sizes_strides() || state.wants_gradient(tensor)) return false;
            if (front_ && !is_plain(tensor, state, autocast_rule_)) return false;
        }
        const uint64_t hash = Look::hash(kinds_, arguments, given);
        auto made = std::make_unique<Entry>(
            Entry{Look(kinds_, arguments, given, state), std::make_shared<const Plan>(std::move(plan))});
        if (entries_.size() >= kLimit) clear();
        heat(entries_.emplace(hash, std::move(made))->second.get());
        return true;
    }

    // Entries are destroyed last: that may run Python code, which may call in here.
    void clear() {
        hot_count_ = 0;
        auto dropped = std::move(entries_);
        entries_.clear();
    }

    size_t size() const { return entries_.size(); }

    PyObject* run(const Plan& plan, PyObject* const* arguments) const {
        c10::OptionalDeviceGuard guard(plan.device);
        if (plan.call) return run_operator(plan, arguments);
        if (!plan.outputs.empty()) return run_into_new(plan, arguments);
        const bool buffered = has_buffer_ && arguments[passed_ - 1] != Py_None;
        const size_t count = passed_ - (has_buffer_ && !buffered);
        PyObject* result = PyObject_Vectorcall(plan.function.get(), arguments, count, nullptr);
        if (!buffered || result == nullptr) return result;
        Py_DECREF(result);
        return Py_NewRef(arguments[passed_ - 1]);
    }

    int visit(visitproc visit, void* arg) const {
        for (const auto& item : entries_) Py_VISIT(item.second->plan->function.get());
        return 0;
    }

  private:
    PyObject* run_into_new(const Plan& plan, PyObject* const* arguments) const {
        const size_t given = passed_ - has_buffer_, count = plan.outputs.size();
        PyObject* all[kMaxSlots + kMaxOutputs];
        std::memcpy(all, arguments, given * sizeof *all);
        Object outputs[kMaxOutputs];
        for (size_t i = 0; i < count; ++i) {
            outputs[i] = Object::take(THPVariable_Wrap(plan.outputs[i].allocate()));
            if (!outputs[i]) return nullptr;
            all[given + i] = outputs[i].get();
        }
        if (!Object::take(PyObject_Vectorcall(plan.function.get(), all, given + count, nullptr))) return nullptr;
        return one_or_tuple(outputs, count);
    }

    PyObject* run_operator(const Plan& plan, PyObject* const* arguments) const {
        const size_t count = plan.outputs.size();
        at::Tensor made[kMaxOutputs];
        for (size_t i = 0; i < count; ++i) made[i] = plan.outputs[i].allocate();
        plan.call->run(arguments, made);
        if (count == 0) return Py_NewRef(has_buffer_ ? arguments[passed_ - 1] : Py_None);
        Object outputs[kMaxOutputs];
        for (size_t i = 0; i < count; ++i) {
            outputs[i] = Object::take(THPVariable_Wrap(std::move(made[i])));
            if (!outputs[i]) return nullptr;
        }
        return one_or_tuple(outputs, count);
    }

    static PyObject* one_or_tuple(Object* outputs, size_t count) {
        if (count == 1) return outputs[0].release();
        PyObject* all = PyTuple_New(static_cast<Py_ssize_t>(count));
        for (size_t i = 0; all != nullptr && i < count; ++i) {
            PyTuple_SET_ITEM(all, static_cast<Py_ssize_t>(i), outputs[i].release());
        }
        return all;
    }

    void heat(Entry* entry) {
        if (hot_count_ < kHot) ++hot_count_;
        for (size_t i = hot_count_ - 1; i > 0; --i) hot_[i] = hot_[i - 1];
        hot_[0] = entry;
    }

    std::string kinds_;
    bool front_, autocast_rule_;
    size_t passed_ = 0;  // how many slots are arguments of the kernel, ``out`` included
    bool has_buffer_ = false;
    std::unordered_multimap<uint64_t, std::unique_ptr<Entry>> entries_;
    Entry* hot_[kHot] = {};
    size_t hot_count_ = 0;
};

}  // namespace tskernel
