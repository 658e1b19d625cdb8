#include "device.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

namespace device {

thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
std::set<Stream*> capturing;

namespace {

constexpr int DEVICES_MAX = 16;
Stream default_streams[DEVICES_MAX];
std::atomic<long long> next_graph{1};

struct Event {
  double at = 0;          // milliseconds
  Graph* graph = nullptr; // that it was recorded in
};

bool is_default(cudaStream_t stream) {
  return (uintptr_t)stream <= 2;
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

} // namespace

Stream* stream_of(cudaStream_t stream) {
  if (!is_default(stream)) return (Stream*)stream;
  Stream* found = &default_streams[current];
  found->device = current;
  return found;
}

cudaError_t illegal(const char* what) {
  counters.illegal++;
  log("ILLEGAL in a capture: %s", what);
  for (Stream* each : capturing) each->broken = true;
  return returned(cudaErrorStreamCaptureUnsupported);
}

bool unsafe() {
  Lock lock(mutex);
  if (mode == cudaStreamCaptureModeRelaxed) return false;
  return std::any_of(capturing.begin(), capturing.end(),
                     [](Stream* each) { return each->how != cudaStreamCaptureModeRelaxed; });
}

} // namespace device

using namespace device;

extern "C" {

// ---- streams -------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
  *made = (cudaStream_t) new Stream{current, priority, flags};
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* made) {
  return cudaStreamCreateWithPriority(made, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess; // torch has a pool of them, and asks after one that is gone
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream_of(stream)->graph ? illegal("cudaStreamQuery") : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream_of(stream)->graph) return illegal("cudaStreamSynchronize");
  counters.stream_syncs++;
  log("sync stream");
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(mutex);
  Graph* graph = ((Event*)event)->graph;
  Stream* waiting = stream_of(stream);
  if (!graph || waiting->graph) return cudaSuccess;
  if (is_default(stream)) return illegal("the default stream joins a capture");
  waiting->graph = graph;
  capturing.insert(waiting);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

// ---- events --------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) {
  *made = (cudaEvent_t) new Event;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* made) {
  return cudaEventCreateWithFlags(made, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  *(Event*)event = Event{now(), stream_of(stream)->graph};
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return ((Event*)event)->graph ? returned(cudaErrorCapturedEvent) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (((Event*)event)->graph) return illegal("cudaEventSynchronize");
  counters.event_syncs++;
  log("sync event");
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::max((float)(((Event*)end)->at - ((Event*)begin)->at), 1e-3f);
  return cudaSuccess;
}

// ---- capture -------------------------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* given) {
  std::swap(*given, mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode how) {
  Lock lock(mutex);
  if (is_default(stream)) return returned(cudaErrorStreamCaptureUnsupported);
  Stream* origin = stream_of(stream);
  origin->graph = new Graph{next_graph++};
  origin->broken = false;
  origin->how = how;
  capturing.insert(origin);
  counters.captures++;
  log("capture %lld begins", origin->graph->number);
  tell(CAPTURE_BEGINS, origin->graph->number, "");
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* made) {
  Lock lock(mutex);
  Stream* origin = stream_of(stream);
  Graph* graph = origin->graph;
  if (!graph) return returned(cudaErrorIllegalState);
  bool broken = origin->broken;
  for (auto it = capturing.begin(); it != capturing.end();) {
    bool of_this = (*it)->graph == graph;
    if (of_this) (*it)->graph = nullptr, (*it)->broken = false;
    it = of_this ? capturing.erase(it) : std::next(it);
  }
  log("capture %lld ends%s", graph->number, broken ? ", broken" : "");
  tell(CAPTURE_ENDS, broken ? -graph->number : graph->number, "");
  *made = broken ? nullptr : (cudaGraph_t)graph;
  return broken ? returned(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Stream* asked = stream_of(stream);
  *status = !asked->graph   ? cudaStreamCaptureStatusNone
            : asked->broken ? cudaStreamCaptureStatusInvalidated
                            : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  bool captured = stream_of((cudaStream_t)stream)->graph;
  *status = captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* number,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  Graph* into = stream_of(stream)->graph;
  if (number) *number = into ? into->number : 0;
  if (graph) *graph = (cudaGraph_t)into;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                unsigned) {
  return cudaSuccess;
}

// ---- graphs: graphs.py knows what they do --------------------------------------------------------------------------

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = (cudaGraphExec_t)graph;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  long long number = ((Graph*)graph)->number;
  counters.graph_launches++;
  log("graph %lld launched", number);
  tell(GRAPH_LAUNCHED, number, "");
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1; // torch warns of an empty one
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  *count = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t) {
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void*, cudaHostFn_t, unsigned, unsigned) {
  *made = (cudaUserObject_t)1;
  return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) {
  return cudaSuccess;
}
}
