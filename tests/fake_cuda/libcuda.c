/* A CUDA driver that runs nothing: it takes what Triton asks of libcuda.so.1 and keeps what the last launch was given.
 * It lets a machine without a GPU compare two ways of launching byte for byte, and time what they cost the host. */
#include <cuda.h>
#include <string.h>

typedef struct {
  CUlaunchConfig config;
  CUlaunchAttribute attributes[4];
  CUfunction function;
  unsigned char parameters[4096];
  unsigned long long bytes, launches;
} Launch;

typedef struct {
  CUfunction function;
  int count;
  size_t sizes[256];
} Parameters;

static Launch last;
static Parameters known[64];
static int functions, result, context = 1;

static const Parameters *parameters_of(CUfunction function) {
  for (int i = 0; i < functions; i++)
    if (known[i].function == function)
      return &known[i];
  return NULL;
}

/* For the tests: sizes of a function's parameters, what a launch returns, and the last launch. */
void fake_declare(CUfunction function, int count, const size_t *sizes) {
  Parameters *p = (Parameters *)parameters_of(function);
  p = p ? p : &known[functions++ % 64];
  p->function = function;
  p->count = count;
  memcpy(p->sizes, sizes, count * sizeof(size_t));
}
void fake_result(int value) { result = value; }
const Launch *fake_last(void) { return &last; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  if (result || extra)
    return result ? result : CUDA_ERROR_INVALID_VALUE;
  last.config = *config;
  memcpy(last.attributes, config->attrs, config->numAttrs * sizeof(CUlaunchAttribute));
  last.config.attrs = NULL;
  last.function = function;
  last.bytes = 0;
  last.launches++;
  const Parameters *p = parameters_of(function);
  for (int i = 0; p && i < p->count; i++) {
    memcpy(last.parameters + last.bytes, params[i], p->sizes[i]);
    last.bytes += p->sizes[i];
  }
  return CUDA_SUCCESS;
}
CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
  const Parameters *p = parameters_of(function);
  if (!p || index >= (size_t)p->count)
    return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *size = p->sizes[index];
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 227 << 10 : 132;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "made up";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *current) {
  *current = (CUcontext)&context;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit which) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit which, size_t value) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *which, void **data, CUdeviceptr pointer) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
/* The map is opaque: here it is where the tensor starts and how large it and its tile are. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *start,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *tile,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  memset(map, 0, sizeof(*map));
  map->opaque[0] = (cuuint64_t)start;
  memcpy(map->opaque + 1, sizes, rank * sizeof(*sizes));
  memcpy(map->opaque + 6, tile, rank * sizeof(*tile));
  return CUDA_SUCCESS;
}
