// The state that the emulated CUDA runtime, driver and cuBLAS share.
//
// Nothing runs on a device: memory is host memory, a kernel is counted, a copy is done at once by
// the thread that asks for it. What is modelled with care is what a program's host code can do
// wrong: synchronise, copy pageable memory, allocate, or do any of them while a stream is captured.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulated {

// ---- Counters ----------------------------------------------------------------------------------

enum Counter {
  KERNELS,
  KERNELS_CAPTURED,
  KERNELS_REPLAYED,
  COPIES_D2D,
  COPIES_H2D_PINNED,
  COPIES_H2D_PAGEABLE,
  COPIES_D2H_PINNED,
  COPIES_D2H_PAGEABLE,
  COPIES_H2H,
  COPIES_CAPTURED,
  COPIES_REPLAYED,
  MEMSETS,
  MEMSETS_CAPTURED,
  MEMSETS_REPLAYED,
  HOST_CALLS,
  HOST_CALLS_CAPTURED,
  HOST_CALLS_REPLAYED,
  SYNC_DEVICE,
  SYNC_STREAM,
  SYNC_EVENT,
  SYNC_COPY,
  CAPTURES,
  CAPTURE_VIOLATIONS,
  GRAPH_LAUNCHES,
  ALLOCATIONS,
  FREES,
  PINNED_ALLOCATIONS,
  PINNED_FREES,
  POINTER_QUERIES,
  MODULES_LOADED,
  COUNTERS
};

void count(Counter counter);
void count_sync(Counter counter, const char* call);

// A kernel of a fatbinary, of a module that Triton loads, or a routine of cuBLAS.
struct Kernel {
  std::string name;
  long runs = 0;  // launched outside of captures, or replayed
};

Kernel* new_kernel(const std::string& name);

// ---- Streams, captures, graphs -----------------------------------------------------------------

struct Operation {
  Counter replayed;
  std::function<void()> run;
};

struct Graph {
  std::vector<Operation> operations;
};

struct Capture;

struct Stream {
  Capture* capture = nullptr;
};

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;  // that began it
  Stream* origin;
  std::vector<Stream*> streams;  // the origin, and those that joined by waiting for an event
  Graph* graph;
  bool invalid = false;
};

struct Event {
  bool timed;
  bool recorded = false;
  double milliseconds = 0;
  unsigned long long capture = 0;  // id of the capture in which it was recorded last, or 0
};

// How often something happens: at once, into a graph, by a replay of the graph.
struct Kind {
  Counter now;
  Counter captured;
  Counter replayed;
};

constexpr Kind KERNEL = {KERNELS, KERNELS_CAPTURED, KERNELS_REPLAYED};
constexpr Kind MEMSET = {MEMSETS, MEMSETS_CAPTURED, MEMSETS_REPLAYED};
constexpr Kind HOST_CALL = {HOST_CALLS, HOST_CALLS_CAPTURED, HOST_CALLS_REPLAYED};

Stream* stream_of(cudaStream_t handle);
Capture* active_capture(unsigned long long id);
Capture* begin_capture(Stream* stream, cudaStreamCaptureMode mode);
void end_capture(Capture* capture);

// Does an operation, or adds it to the graph that the stream is captured into.
cudaError_t submit(cudaStream_t stream, Kind kind, std::function<void()> run);
cudaError_t launch(cudaStream_t stream, Kernel* kernel);

// ---- Errors ------------------------------------------------------------------------------------

// Notes the thread's last error, which cudaGetLastError returns, and returns it.
cudaError_t fail(cudaError_t error);
cudaError_t take_last_error();
cudaError_t last_error();

// An operation that a capture forbids: the capture is invalidated.
cudaError_t violate(Capture* capture, const char* call, cudaError_t error);

// Refuses a call that CUDA calls potentially unsafe, in the modes of captures that forbid it.
cudaError_t refuse_unsafe(const char* call);

// Refuses what synchronises the whole device while any stream is captured, whatever the mode.
cudaError_t refuse_any_capture(const char* call);

cudaStreamCaptureMode exchange_thread_mode(cudaStreamCaptureMode mode);

// ---- Memory ------------------------------------------------------------------------------------

size_t device_limit();
size_t device_used();
void* allocate_device(size_t bytes);  // null where the limit is exceeded
void free_device(void* pointer);
void* allocate_pinned(size_t bytes);
void free_pinned(void* pointer);
void register_pinned(void* pointer, size_t bytes);
void unregister_pinned(void* pointer);
bool is_device(const void* pointer);
bool is_pinned(const void* pointer);
void copy_bytes(void* to, const void* from, size_t bytes);
void set_bytes(void* to, int value, size_t bytes);

// ------------------------------------------------------------------------------------------------

// Every entry point that touches shared state holds it; callbacks of the host call back.
extern std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace emulated
