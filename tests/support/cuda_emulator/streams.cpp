// The entry points of the CUDA runtime for copies, streams, events and graphs: what is ordered, and
// what a capture forbids.
//
// Not modelled: streams of a capture that are not joined to its origin again when it ends, and the
// legacy stream, which blocks captures of streams that are not cudaStreamNonBlocking (torch's are).
#include "emulator.h"

#include <algorithm>
#include <chrono>

using namespace emulated;

// ---- Copies ------------------------------------------------------------------------------------

static Counter direction_of(const void* to, const void* from) {
  if (is_device(to) && is_device(from)) return COPIES_D2D;
  if (is_device(to)) return is_pinned(from) ? COPIES_H2D_PINNED : COPIES_H2D_PAGEABLE;
  if (is_device(from)) return is_pinned(to) ? COPIES_D2H_PINNED : COPIES_D2H_PAGEABLE;
  return COPIES_H2H;
}

static cudaError_t copy(cudaStream_t stream, void* to, const void* from,
                        std::function<void()> run) {
  Lock lock(emulated::mutex);
  Counter direction = direction_of(to, from);
  Capture* capture = stream_of(stream)->capture;
  bool pageable = direction == COPIES_H2D_PAGEABLE || direction == COPIES_D2H_PAGEABLE;
  if (capture != nullptr && pageable) {
    const char* call = "copy of pageable memory while capturing";
    return violate(capture, call, cudaErrorStreamCaptureUnsupported);
  }
  return submit(stream, {direction, COPIES_CAPTURED, COPIES_REPLAYED}, std::move(run));
}

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  return copy(stream, to, from, [=] { copy_bytes(to, from, bytes); });
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                       cudaStream_t stream) {
  return copy(stream, to, from, [=] { copy_bytes(to, from, bytes); });
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                                     size_t from_pitch, size_t width, size_t height,
                                     cudaMemcpyKind, cudaStream_t stream) {
  return copy(stream, to, from, [=] {
    for (size_t row = 0; row < height; row++) {
      copy_bytes(static_cast<char*>(to) + row * to_pitch,
                 static_cast<const char*>(from) + row * from_pitch, width);
    }
  });
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  count_sync(SYNC_COPY, "cudaMemcpy");
  if (cudaError_t error = refuse_unsafe("cudaMemcpy while capturing")) return error;
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return submit(stream, MEMSET, [=] { set_bytes(to, value, bytes); });
}

EXPORT cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (cudaError_t error = refuse_unsafe("cudaMemset while capturing")) return error;
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

// ---- Streams -----------------------------------------------------------------------------------

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream());
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream_of(stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

// A stream that is captured can be neither waited for nor asked, in no mode. CUDA's manual does not
// say of the other streams; to ask them is taken for potentially unsafe, as cudaEventQuery is.
static cudaError_t refuse_wait(cudaStream_t handle, const char* call) {
  Lock lock(emulated::mutex);
  Capture* capture = stream_of(handle)->capture;
  if (capture != nullptr) return violate(capture, call, cudaErrorStreamCaptureUnsupported);
  return refuse_unsafe(call);
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return refuse_wait(stream, "cudaStreamQuery while capturing");
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count_sync(SYNC_STREAM, "cudaStreamSynchronize");
  return refuse_wait(stream, "cudaStreamSynchronize while capturing");
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                         void* data, unsigned) {
  Lock lock(emulated::mutex);
  if (Capture* capture = stream_of(stream)->capture) {
    const char* call = "cudaStreamAddCallback while capturing";
    return violate(capture, call, cudaErrorStreamCaptureUnsupported);
  }
  return submit(stream, HOST_CALL, [=] { function(stream, cudaSuccess, data); });
}

// ---- Events ------------------------------------------------------------------------------------

namespace {

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

// Milliseconds; each is later than the one before by half a microsecond, CUDA's resolution.
double next_time() {
  static double last = 0;
  auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  double now = std::chrono::duration<double, std::milli>(since_start).count();
  return last = std::max(now, last + 0.0005);
}

// An event that was recorded in a capture stands for no point in time: error in every mode.
cudaError_t refuse_event(cudaEvent_t handle, const char* call) {
  Lock lock(emulated::mutex);
  if (Capture* capture = active_capture(event_of(handle)->capture)) {
    return violate(capture, call, cudaErrorCapturedEvent);
  }
  return refuse_unsafe(call);
}

}  // namespace

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  bool timed = !(flags & cudaEventDisableTiming);
  *event = reinterpret_cast<cudaEvent_t>(new Event{timed});
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream,
                                            unsigned flags) {
  Lock lock(emulated::mutex);
  Event* event = event_of(handle);
  Capture* capture = stream_of(stream)->capture;
  if (capture != nullptr && capture->invalid) return fail(cudaErrorStreamCaptureInvalidated);
  bool external = flags & cudaEventRecordExternal;
  event->capture = capture != nullptr && !external ? capture->id : 0;
  event->recorded = true;
  event->milliseconds = next_time();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  return refuse_event(event, "cudaEventQuery while capturing");
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count_sync(SYNC_EVENT, "cudaEventSynchronize");
  return refuse_event(event, "cudaEventSynchronize while capturing");
}

EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  Lock lock(emulated::mutex);
  for (Event* event : {event_of(from), event_of(to)}) {
    if (!event->timed || !event->recorded) return fail(cudaErrorInvalidResourceHandle);
    if (active_capture(event->capture)) return fail(cudaErrorCapturedEvent);
  }
  *milliseconds = float(event_of(to)->milliseconds - event_of(from)->milliseconds);
  return cudaSuccess;
}

// A stream that waits for an event of a capture is captured from then on; a stream that is captured
// cannot wait for what is not.
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
  Lock lock(emulated::mutex);
  Stream* waiting = stream_of(stream);
  Event* event = event_of(handle);
  if (!event->recorded || flags & cudaEventWaitExternal) return cudaSuccess;
  Capture* capture = active_capture(event->capture);
  if (waiting->capture == capture) return cudaSuccess;
  if (waiting->capture != nullptr) {
    const char* call = "cudaStreamWaitEvent for an event of no capture, or of another";
    return violate(waiting->capture, call, cudaErrorStreamCaptureIsolation);
  }
  if (capture->invalid) return fail(cudaErrorStreamCaptureInvalidated);
  waiting->capture = capture;
  capture->streams.push_back(waiting);
  return cudaSuccess;
}

// ---- Captures and graphs -----------------------------------------------------------------------

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Lock lock(emulated::mutex);
  Stream* stream = stream_of(handle);
  if (stream == stream_of(nullptr)) return fail(cudaErrorStreamCaptureUnsupported);
  if (stream->capture != nullptr) return fail(cudaErrorIllegalState);
  begin_capture(stream, mode);
  count(CAPTURES);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Lock lock(emulated::mutex);
  *graph = nullptr;
  Stream* stream = stream_of(handle);
  Capture* capture = stream->capture;
  if (capture == nullptr) return fail(cudaErrorIllegalState);
  if (capture->origin != stream) return fail(cudaErrorStreamCaptureUnmatched);
  bool relaxed = capture->mode == cudaStreamCaptureModeRelaxed;
  if (!relaxed && capture->thread != std::this_thread::get_id()) {
    return fail(cudaErrorStreamCaptureWrongThread);
  }
  Graph* made = capture->graph;
  bool invalid = capture->invalid;
  end_capture(capture);
  if (invalid) {
    delete made;
    return fail(cudaErrorStreamCaptureInvalidated);
  }
  *graph = reinterpret_cast<cudaGraph_t>(made);
  return cudaSuccess;
}

static cudaStreamCaptureStatus status_of(const Capture* capture) {
  if (capture == nullptr) return cudaStreamCaptureStatusNone;
  return capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock(emulated::mutex);
  *status = status_of(stream_of(stream)->capture);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph,
                                            const cudaGraphNode_t** dependencies,
                                            const cudaGraphEdgeData** edges, size_t* number) {
  Lock lock(emulated::mutex);
  Capture* capture = stream_of(stream)->capture;
  if (status != nullptr) *status = status_of(capture);
  if (id != nullptr) *id = capture ? capture->id : 0;
  if (graph != nullptr) *graph = capture ? reinterpret_cast<cudaGraph_t>(capture->graph) : nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (number != nullptr) *number = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = exchange_thread_mode(*mode);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                                 unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  Lock lock(emulated::mutex);
  if (Capture* capture = stream_of(stream)->capture) {
    const char* call = "cudaGraphLaunch while capturing: graphs within graphs are not emulated";
    return violate(capture, call, cudaErrorStreamCaptureUnsupported);
  }
  count(GRAPH_LAUNCHES);
  for (const Operation& operation : reinterpret_cast<Graph*>(executable)->operations) {
    count(operation.replayed);
    operation.run();
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* number) {
  auto& operations = reinterpret_cast<Graph*>(graph)->operations;
  if (nodes == nullptr) {
    *number = operations.size();
    return cudaSuccess;
  }
  *number = std::min(*number, operations.size());
  for (size_t i = 0; i < *number; i++) {
    nodes[i] = reinterpret_cast<cudaGraphNode_t>(&operations[i]);
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) {
  return cudaSuccess;
}
