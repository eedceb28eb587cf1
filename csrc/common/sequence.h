// Launches that follow one another within a call: the next one may begin before the last one has ended, and waits on the
// device (after_previous() in lanes.h). Where the device cannot do that it is an ordinary launch.
#pragma once

#include "host.h"

namespace tsk {

#if defined(TSK_CUDA)
inline bool launches_overlap(int device) {
    int major = 0;
    const auto error =
        TSK_RUNTIME(DeviceGetAttribute)(&major, TSK_RUNTIME(DevAttrComputeCapabilityMajor), device);
    return error == TSK_RUNTIME(Success) && major >= 9;
}

template <typename... P, typename... A>
void launch_after(const Tensor& like, const Launch& shape, void (*kernel)(P...), A... args) {
    const int device = like.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    TSK_RUNTIME(LaunchAttribute) overlap[1];
    overlap[0].id = TSK_RUNTIME(LaunchAttributeProgrammaticStreamSerialization);
    overlap[0].val.programmaticStreamSerializationAllowed = 1;
    TSK_RUNTIME(LaunchConfig_t) config = {};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.stream = static_cast<TSK_RUNTIME(Stream_t)>(stream);
    config.attrs = overlap;
    config.numAttrs = launches_overlap(device) ? 1 : 0;
    const auto error = TSK_RUNTIME(LaunchKernelEx)(&config, kernel, P(args)...);
    STD_TORCH_CHECK(error == TSK_RUNTIME(Success), "tskernel_native: launch: ", TSK_RUNTIME(GetErrorString)(error));
}
#else
template <typename... P, typename... A>
void launch_after(const Tensor& like, const Launch& shape, void (*kernel)(P...), A... args) {
    launch(like, shape, kernel, args...);
}
#endif

}  // namespace tsk
