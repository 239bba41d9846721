// The entry points of the CUDA runtime that torch 2.11 calls: kernels, the device, errors, memory.
// Streams, events and graphs are in streams.cpp.
#include "emulator.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <unordered_map>

using namespace emulated;

// ---- Registration of kernels, and launches -----------------------------------------------------

namespace {

// Host function that stands for a kernel -> the kernel.
std::unordered_map<const void*, Kernel*>& registered_kernels() {
  static auto* made = new std::unordered_map<const void*, Kernel*>();
  return *made;
}

Kernel* kernel_of(const void* host_function) {
  Lock lock(emulated::mutex);
  Kernel*& kernel = registered_kernels()[host_function];
  if (kernel == nullptr) kernel = new_kernel("unregistered");
  return kernel;
}

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  void* stream;
};

thread_local std::vector<Configuration> configurations;

}  // namespace

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void**) {}

EXPORT void __cudaUnregisterFatBinary(void**) {}

EXPORT char __cudaInitModule(void**) { return 1; }

EXPORT void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int,
                                   void*, void*, void*, void*, int*) {
  Lock lock(emulated::mutex);
  registered_kernels()[host_function] = new_kernel(name);
}

EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                            void* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                              void* stream) {
  if (configurations.empty()) return fail(cudaErrorMissingConfiguration);
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
  *kernel = reinterpret_cast<cudaKernel_t>(kernel_of(host_function));
  return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t,
                                      cudaStream_t stream) {
  return launch(stream, reinterpret_cast<Kernel*>(kernel));
}

EXPORT cudaError_t cudaLaunchKernel(const void* host_function, dim3, dim3, void**, size_t,
                                    cudaStream_t stream) {
  return launch(stream, kernel_of(host_function));
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration,
                                       const void* host_function, void**) {
  return launch(configuration->stream, kernel_of(host_function));
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return submit(stream, HOST_CALL, [=] { function(data); });
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = 90;
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*,
                                                                          int, size_t, unsigned) {
  *blocks = 8;
  return cudaSuccess;
}

// ---- The device: an H100 -----------------------------------------------------------------------

EXPORT cudaError_t cudaGetDeviceCount(int* devices) {
  *devices = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice);
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int) {
  *properties = {};
  strcpy(properties->name, "NVIDIA H100 80GB HBM3 (emulated)");
  properties->major = 9;
  properties->minor = 0;
  properties->totalGlobalMem = device_limit();
  properties->totalConstMem = 65536;
  properties->l2CacheSize = 50 << 20;
  properties->memoryBusWidth = 5120;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->asyncEngineCount = 3;
  properties->warpSize = 32;
  properties->multiProcessorCount = 132;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->regsPerBlock = 65536;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = 1024;
  properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = 65535;
  properties->maxGridSize[2] = 65535;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::unordered_map<int, int> values = {
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
  };
  auto found = values.find(attribute);
  *value = found == values.end() ? 1 : found->second;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  snprintf(text, size, "0000:01:00.0");
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  count_sync(SYNC_DEVICE, "cudaDeviceSynchronize");
  return refuse_any_capture("cudaDeviceSynchronize while capturing");
}

EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }

EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// The driver is in this library too; what it has not got succeeds and does nothing.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  static int (*const nothing)() = [] { return 0; };
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) *function = reinterpret_cast<void*>(nothing);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- Errors ------------------------------------------------------------------------------------

namespace {

struct ErrorText {
  const char* name;
  const char* text;
};

ErrorText text_of(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return {"cudaSuccess", "no error"};
    case cudaErrorMemoryAllocation:
      return {"cudaErrorMemoryAllocation", "out of memory"};
    case cudaErrorInvalidResourceHandle:
      return {"cudaErrorInvalidResourceHandle", "invalid resource handle"};
    case cudaErrorStreamCaptureUnsupported:
      return {"cudaErrorStreamCaptureUnsupported",
              "operation not permitted when stream is capturing"};
    case cudaErrorStreamCaptureInvalidated:
      return {"cudaErrorStreamCaptureInvalidated",
              "operation failed due to a previous error during capture"};
    case cudaErrorStreamCaptureIsolation:
      return {"cudaErrorStreamCaptureIsolation",
              "dependency created on uncaptured work in another stream"};
    case cudaErrorCapturedEvent:
      return {"cudaErrorCapturedEvent",
              "operation not permitted on an event last recorded in a capturing stream"};
    default:
      return {"cudaErrorUnknown", "an error that the emulator has no text for"};
  }
}

}  // namespace

EXPORT const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }

EXPORT const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }

EXPORT cudaError_t cudaGetLastError() { return take_last_error(); }

EXPORT cudaError_t cudaPeekAtLastError() { return last_error(); }

// ---- Allocations -------------------------------------------------------------------------------

static cudaError_t allocate(void** pointer, size_t bytes) {
  *pointer = allocate_device(bytes);
  return *pointer == nullptr ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  count(ALLOCATIONS);
  if (cudaError_t error = refuse_unsafe("cudaMalloc while capturing")) return error;
  return allocate(pointer, bytes);
}

EXPORT cudaError_t cudaFree(void* pointer) {
  count(FREES);
  if (cudaError_t error = refuse_unsafe("cudaFree while capturing")) return error;
  free_device(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  count(ALLOCATIONS);
  return allocate(pointer, bytes);
}

EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  count(FREES);
  free_device(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  count(PINNED_ALLOCATIONS);
  if (cudaError_t error = refuse_unsafe("cudaHostAlloc while capturing")) return error;
  *pointer = allocate_pinned(bytes);
  return *pointer == nullptr ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void* pointer) {
  count(PINNED_FREES);
  if (cudaError_t error = refuse_unsafe("cudaFreeHost while capturing")) return error;
  free_pinned(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  count(PINNED_ALLOCATIONS);
  if (cudaError_t error = refuse_unsafe("cudaHostRegister while capturing")) return error;
  register_pinned(pointer, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  count(PINNED_FREES);
  if (cudaError_t error = refuse_unsafe("cudaHostUnregister while capturing")) return error;
  unregister_pinned(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = device_limit();
  *free = device_limit() - device_used();
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                            const void* pointer) {
  count(POINTER_QUERIES);
  *attributes = {};
  attributes->type = is_device(pointer)   ? cudaMemoryTypeDevice
                     : is_pinned(pointer) ? cudaMemoryTypeHost
                                          : cudaMemoryTypeUnregistered;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

// Variables in fatbinaries, such as tables of constants: one address for all, which no kernel reads.
EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char variable[256];
  *pointer = variable;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  memset(value, 0, 8);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
