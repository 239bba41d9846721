// Counters, streams and captures, and how tests read them.
#include "emulator.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <utility>

namespace emulated {

std::recursive_mutex mutex;

// ---- Counters ----------------------------------------------------------------------------------

static const char* const NAMES[COUNTERS] = {
    "kernels",
    "kernels captured",
    "kernels replayed",
    "copy: D2D",
    "copy: H2D pinned",
    "copy: H2D pageable",
    "copy: D2H pinned",
    "copy: D2H pageable",
    "copy: H2H",
    "copies captured",
    "copies replayed",
    "memsets",
    "memsets captured",
    "memsets replayed",
    "host calls",
    "host calls captured",
    "host calls replayed",
    "sync: device",
    "sync: stream",
    "sync: event",
    "sync: copy",
    "captures",
    "capture violations",
    "graph launches",
    "allocations",
    "frees",
    "pinned allocations",
    "pinned frees",
    "pointer queries",
    "modules loaded",
};

static std::array<long, COUNTERS> counters;
static const bool tracing = getenv("CUDA_EMULATOR_TRACE") != nullptr;

// Libraries register kernels before this one's static objects are made; hence made at first use,
// and never destroyed, because they may go on to use it when the process ends.
static std::deque<Kernel>& kernels() {
  static auto* made = new std::deque<Kernel>();
  return *made;
}

void count(Counter counter) {
  Lock lock(mutex);
  counters[counter]++;
}

void count_sync(Counter counter, const char* call) {
  count(counter);
  if (tracing) fprintf(stderr, "cuda_emulator: %s\n", call);
}

Kernel* new_kernel(const std::string& name) {
  Lock lock(mutex);
  kernels().push_back(Kernel{name});
  return &kernels().back();
}

// ---- Streams and captures ----------------------------------------------------------------------

// Those that have begun and not ended. Never destroyed, as the kernels above.
static auto& captures = *new std::vector<Capture*>();
static unsigned long long last_capture = 0;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static thread_local cudaError_t error_of_thread = cudaSuccess;

Stream* stream_of(cudaStream_t handle) {
  static Stream legacy;
  static Stream per_thread;
  if (handle == nullptr || handle == cudaStreamLegacy) return &legacy;
  if (handle == cudaStreamPerThread) return &per_thread;
  return reinterpret_cast<Stream*>(handle);
}

Capture* active_capture(unsigned long long id) {
  for (Capture* capture : captures) {
    if (capture->id == id) return capture;
  }
  return nullptr;
}

Capture* begin_capture(Stream* stream, cudaStreamCaptureMode mode) {
  auto* capture = new Capture{
      ++last_capture, mode, std::this_thread::get_id(), stream, {stream}, new Graph()};
  stream->capture = capture;
  captures.push_back(capture);
  return capture;
}

void end_capture(Capture* capture) {
  for (Stream* stream : capture->streams) stream->capture = nullptr;
  captures.erase(std::find(captures.begin(), captures.end(), capture));
  delete capture;
}

cudaError_t submit(cudaStream_t handle, Kind kind, std::function<void()> run) {
  Lock lock(mutex);
  Capture* capture = stream_of(handle)->capture;
  if (capture == nullptr) {
    counters[kind.now]++;
    run();
    return cudaSuccess;
  }
  if (capture->invalid) return fail(cudaErrorStreamCaptureInvalidated);
  counters[kind.captured]++;
  capture->graph->operations.push_back({kind.replayed, std::move(run)});
  return cudaSuccess;
}

cudaError_t launch(cudaStream_t stream, Kernel* kernel) {
  return submit(stream, KERNEL, [kernel] { kernel->runs++; });
}

// ---- Errors ------------------------------------------------------------------------------------

cudaError_t fail(cudaError_t error) {
  error_of_thread = error;
  return error;
}

cudaError_t take_last_error() { return std::exchange(error_of_thread, cudaSuccess); }

cudaError_t last_error() { return error_of_thread; }

cudaError_t violate(Capture* capture, const char* call, cudaError_t error) {
  count_sync(CAPTURE_VIOLATIONS, call);
  capture->invalid = true;
  return fail(error);
}

cudaError_t refuse_unsafe(const char* call) {
  Lock lock(mutex);
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  cudaError_t result = cudaSuccess;
  for (Capture* capture : captures) {
    bool own = capture->thread == std::this_thread::get_id();
    bool both_global = thread_mode == cudaStreamCaptureModeGlobal &&
                       capture->mode == cudaStreamCaptureModeGlobal;
    if (own ? capture->mode != cudaStreamCaptureModeRelaxed : both_global) {
      result = violate(capture, call, cudaErrorStreamCaptureUnsupported);
    }
  }
  return result;
}

cudaError_t refuse_any_capture(const char* call) {
  Lock lock(mutex);
  cudaError_t result = cudaSuccess;
  for (Capture* capture : captures) {
    result = violate(capture, call, cudaErrorStreamCaptureUnsupported);
  }
  return result;
}

cudaStreamCaptureMode exchange_thread_mode(cudaStreamCaptureMode mode) {
  return std::exchange(thread_mode, mode);
}

// ---- How tests read it -------------------------------------------------------------------------

static std::string json(const std::map<std::string, long>& values) {
  std::string text;
  for (const auto& [name, value] : values) {
    text += (text.empty() ? "\"" : ", \"") + name + "\": " + std::to_string(value);
  }
  return "{" + text + "}";
}

static std::string demangled(const std::string& name) {
  int status;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = text ? text : name;
  free(text);
  return result;
}

}  // namespace emulated

using namespace emulated;

EXPORT void cuda_emulator_reset() {
  Lock lock(emulated::mutex);
  counters.fill(0);
  for (Kernel& kernel : kernels()) kernel.runs = 0;
}

// The counters that are not zero, as JSON; the text is good until the next call of the thread.
EXPORT const char* cuda_emulator_counts() {
  static thread_local std::string text;
  Lock lock(emulated::mutex);
  std::map<std::string, long> values;
  for (int i = 0; i < COUNTERS; i++) {
    if (counters[i]) values[NAMES[i]] = counters[i];
  }
  return (text = json(values)).c_str();
}

EXPORT const char* cuda_emulator_kernels() {
  static thread_local std::string text;
  Lock lock(emulated::mutex);
  std::map<std::string, long> values;
  for (const Kernel& kernel : kernels()) {
    if (kernel.runs) values[demangled(kernel.name)] += kernel.runs;
  }
  return (text = json(values)).c_str();
}
