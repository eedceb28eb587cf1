// What the dispatcher would see of a call: dispatch keys under this thread's state, and function modes.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tskernel {

// Keys with which an eager call on plain tensors runs just its backend's kernel. A key that is not named here, of
// today's torch or of a later one, sends the call through the dispatcher.
constexpr c10::DispatchKeySet kPlainKeys =
    c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::AutogradFunctionality,
                         c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::BackendSelect}) |
    c10::DispatchKeySet({c10::BackendComponent::CPUBit, c10::BackendComponent::CUDABit, c10::BackendComponent::HIPBit,
                         c10::BackendComponent::XPUBit, c10::BackendComponent::PrivateUse1Bit});

// This thread's state, read once a call.
struct ThreadState {
    c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    bool grad = c10::GradMode::is_enabled();

    uint64_t applied(const at::TensorImpl& tensor) const {
        return ((tensor.key_set() | keys.included_) - keys.excluded_).raw_repr();
    }

    bool wants_gradient(const at::TensorImpl& tensor) const { return grad && tensor.requires_grad(); }
};

// Whether a kernel may be called without the dispatcher on a tensor. Under autocast only where the op has no rule.
inline bool is_plain(const at::TensorImpl& tensor, const ThreadState& state, bool autocast_rule) {
    const uint64_t allowed = kPlainKeys.raw_repr() | (autocast_rule ? 0 : c10::autocast_dispatch_keyset.raw_repr());
    return (state.applied(tensor) & ~allowed) == 0 && !state.wants_gradient(tensor) &&
           !tensor.has_symbolic_sizes_strides();
}

}  // namespace tskernel
