// The entry points of the CUDA driver that Triton 3.6 and torch 2.11 call.
#include "emulator.h"

#include <cuda.h>

#include <unordered_map>

// cuda.h gives it the name of its second version, and Triton asks for both.
#undef cuDevicePrimaryCtxRelease

using namespace emulated;

namespace {

// Handles of what exists once; nobody looks into them.
char the_context;
char the_module;

CUresult result_of(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return CUDA_SUCCESS;
    case cudaErrorStreamCaptureInvalidated:
      return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    default:
      return CUDA_ERROR_UNKNOWN;
  }
}

CUcontext context() { return reinterpret_cast<CUcontext>(&the_context); }

CUmodule module() { return reinterpret_cast<CUmodule>(&the_module); }

}  // namespace

// ---- The device and its context ----------------------------------------------------------------

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* devices) {
  *devices = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  static const std::unordered_map<int, int> values = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1755000},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
  };
  auto found = values.find(attribute);
  if (found == values.end()) return CUDA_ERROR_INVALID_VALUE;
  *value = found->second;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* result) {
  *result = context();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* result, CUdevice) {
  *result = context();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCtx(CUstream, CUcontext* result) {
  *result = context();
  return CUDA_SUCCESS;
}

// ---- Modules and kernels -----------------------------------------------------------------------

EXPORT CUresult cuModuleLoad(CUmodule* result, const char*) {
  *result = module();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule* result, const void*) {
  *result = module();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule* result, const void*, unsigned, CUjit_option*,
                                   void**) {
  *result = module();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  count(MODULES_LOADED);
  *function = reinterpret_cast<CUfunction>(new_kernel(name));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                                : 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }

EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* configuration, CUfunction function, void**,
                                 void**) {
  auto* kernel = reinterpret_cast<Kernel*>(function);
  return result_of(launch(configuration->hStream, kernel));
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned,
                               unsigned, unsigned, unsigned, CUstream stream, void**, void**) {
  return result_of(launch(stream, reinterpret_cast<Kernel*>(function)));
}

// ---- Pointers and errors -----------------------------------------------------------------------

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr pointer) {
  *static_cast<CUdeviceptr*>(value) = pointer;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttributes(unsigned, CUpointer_attribute*, void**, CUdeviceptr) {
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS ? "CUDA_SUCCESS" : "an error of the emulated driver";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  return cuGetErrorName(error, text);
}
