// The host side of every op: torch's stable ABI, rows and alignment of tensors, launches. One library serves torch 2.11
// and later.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>

#include "vector.h"

#if !defined(TSK_EMULATE)
// Declared in shim.h only under USE_CUDA. Weak, so that the library also loads where torch has no GPU support.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream) __attribute__((weak));
#endif

// Every file registers its own ops, as `TSK_OPS(m) { m.def("name(...) -> ()"); }` and `TSK_IMPL(m) { m.impl(...); }`.
#define TSK_OPS(m) STABLE_TORCH_LIBRARY_FRAGMENT(tskernel_native, m)
#if defined(TSK_EMULATE)
#define TSK_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(tskernel_native, CPU, m)
#else
#define TSK_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(tskernel_native, CUDA, m)
#endif

namespace tsk {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(TSK_HIP)
#define TSK_RUNTIME(name) hip##name
#else
#define TSK_RUNTIME(name) cuda##name
#endif

// Kernels go to the current stream of the device of `like`.
struct Launch {
    dim3 grid, block;
};

#if defined(TSK_EMULATE)
template <typename... P, typename... A>
void launch(const Tensor&, const Launch& shape, void (*kernel)(P...), A... args) {
    emulate::launch(shape.grid, shape.block, [=] { kernel(args...); });
}
#else
#if defined(TSK_CUDA)
// Whether a kernel may be launched before the one ahead of it in the stream has ended (see start()): sm_90 and later,
// unless TSKERNEL_PDL is 0.
inline bool early_launch(int device) {
    static const bool wanted = [] {
        const char* value = std::getenv("TSKERNEL_PDL");
        return value == nullptr || value[0] != '0';
    }();
    static std::atomic<signed char> known[64] = {};
    if (!wanted || device < 0 || device >= 64) return false;
    if (known[device] == 0) {
        int major = 0;
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        known[device] = major >= 9 ? 1 : -1;
    }
    return known[device] > 0;
}

template <typename... P, typename... A>
cudaError_t start_kernel(int device, const Launch& shape, void* stream, void (*kernel)(P...), A... args) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &early;
    config.numAttrs = early_launch(device) ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args...);
}
#else
template <typename... P, typename... A>
hipError_t start_kernel(int, const Launch& shape, void* stream, void (*kernel)(P...), A... args) {
    // clang-format off: it parts the closing brackets
    kernel<<<shape.grid, shape.block, 0, static_cast<hipStream_t>(stream)>>>(args...);
    // clang-format on
    return hipGetLastError();
}
#endif

template <typename... P, typename... A>
void launch(const Tensor& like, const Launch& shape, void (*kernel)(P...), A... args) {
    const int device = like.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "tskernel_native: this torch has no GPU support");
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    const auto error = start_kernel(device, shape, stream, kernel, args...);
    STD_TORCH_CHECK(error == TSK_RUNTIME(Success), "tskernel_native: launch: ", TSK_RUNTIME(GetErrorString)(error));
}
#endif

// Enough blocks for latency: below this many, blocks are made as small as they can be.
constexpr int64_t MANY_BLOCKS = 264;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline unsigned round_lanes(int64_t n) { return unsigned(ceil_div(n, LANES) * LANES); }
inline unsigned power_of_two(int64_t n) {
    unsigned p = 1;
    while (p < n) p *= 2;
    return p;
}

// blockDim.x accesses of blockDim.y rows per block, `chunks` blocks for a row of `accesses`. See tile_of().
struct Tiling {
    Launch shape;
    unsigned chunks, tiles;
};
inline Tiling tiling(int64_t rows, int64_t accesses, int64_t least = 1) {
    unsigned x, y = 1, chunks = 1;
    if (accesses <= LANES) {
        x = std::max(power_of_two(accesses), power_of_two(least));
        y = unsigned(std::max<int64_t>(LANES / x, std::min<int64_t>(128 / x, power_of_two(rows / MANY_BLOCKS))));
    } else {
        chunks = unsigned(ceil_div(accesses, 256));
        x = round_lanes(ceil_div(accesses, chunks));
        y = rows > MANY_BLOCKS ? std::max(1u, 256 / x) : 1;
    }
    const int64_t tiles = ceil_div(rows, y) * chunks;
    STD_TORCH_CHECK(tiles < (int64_t(1) << 31), "tskernel_native: too many rows: ", rows);
    return {{dim3(unsigned(tiles)), dim3(x, y)}, chunks, unsigned(tiles)};
}

inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % uintptr_t(bytes) == 0; }

inline int64_t element_size(ScalarType type) {
    switch (type) {
        case ScalarType::Float:
        case ScalarType::Int:
            return 4;
        case ScalarType::Long:
            return 8;
        case ScalarType::Half:
        case ScalarType::BFloat16:
            return 2;
        default:
            return 1;
    }
}

// Rows of a tensor: all dims but the last one, neighbours merged where their strides allow.
struct RowView {
    RowMap map;
    int64_t rows, width, column;
    bool contiguous;

    explicit RowView(const Tensor& t) {
        const auto sizes = t.sizes();
        const auto strides = t.strides();
        const int dims = int(sizes.size());
        width = sizes[size_t(dims - 1)];
        column = width == 1 ? 1 : strides[size_t(dims - 1)];
        rows = 1;
        map = {1, {1}, {0}};
        int n = 0;
        for (int d = 0; d < dims - 1; ++d) {
            const int64_t size = sizes[size_t(d)], stride = strides[size_t(d)];
            rows *= size;
            if (size == 1) continue;
            if (n && map.stride[n - 1] == size * stride) {
                map.size[n - 1] *= size;
                map.stride[n - 1] = stride;
                continue;
            }
            STD_TORCH_CHECK(n < RowMap::MAX_DIMS, "tskernel_native: more than ", int(RowMap::MAX_DIMS),
                            " leading dimensions with strides of their own");
            map.size[n] = size;
            map.stride[n] = stride;
            ++n;
        }
        map.dims = std::max(n, 1);
        contiguous = column == 1 && (rows == 1 || (n == 1 && map.stride[0] == width));
    }

    // Whether every row can be accessed `n` elements of `size` bytes at a time.
    bool wide(const void* data, int64_t n, int64_t size) const {
        if (column != 1 || width % n || !aligned(data, n * size)) return false;
        for (int d = 0; d < map.dims; ++d)
            if (map.stride[d] % n) return false;
        return true;
    }

    // Take a contiguous tensor as one row.
    void flatten() {
        width *= rows;
        rows = 1;
        map = {1, {1}, {0}};
    }
};

// Calls `f(T{})` with the element type of a tensor.
template <typename F>
void for_float(ScalarType type, F f) {
    if (type == ScalarType::BFloat16)
        f(bf16{});
    else if (type == ScalarType::Half)
        f(fp16{});
    else {
        STD_TORCH_CHECK(type == ScalarType::Float, "tskernel_native: expected float32, float16 or bfloat16");
        f(float{});
    }
}

inline int format_of(ScalarType type) {
    switch (type) {
        case ScalarType::Float8_e4m3fn:
            return E4M3FN;
        case ScalarType::Float8_e4m3fnuz:
            return E4M3FNUZ;
        case ScalarType::Float8_e5m2:
            return E5M2;
        case ScalarType::Float8_e5m2fnuz:
            return E5M2FNUZ;
        case ScalarType::Char:
            return INT8;
        case ScalarType::Byte:
            return FP4;
        default:
            STD_TORCH_CHECK(false, "tskernel_native: no quantized dtype");
    }
    return -1;
}

inline float largest_of_format(int format) {
    constexpr float largest[] = {448.0f, 240.0f, 57344.0f, 57344.0f, 127.0f, 6.0f};
    return largest[format];
}

}  // namespace tsk
