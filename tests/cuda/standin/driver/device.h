// A CUDA runtime and driver without a GPU: device memory is host memory, streams run at once, kernels do nothing.
//
// Loaded in front of libcudart.so.13, and found as libcuda.so.1. What it knows: the allocator's calls, the waits of the
// host for the device, stream capture and what is illegal in it, the limits of a launch.
//
//   settings.cpp   what the environment asks for, counters, the log, the hook
//   devices.cpp    devices, contexts, errors
//   memory.cpp     allocations, copies, expandable segments
//   streams.cpp    streams, events, capture, graphs
//   launches.cpp   kernels of torch's runtime and of Triton's driver
//
// `../build.py` adds a function that answers "not supported" for each name that torch links and these files lack.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

namespace device {

// The same fields, in the same order, as in counts.py.
struct Counters {
  long long mallocs, frees, bytes, peak, stream_syncs, device_syncs, event_syncs, h2d, d2h, d2d, runtime_launches,
      driver_launches, captures, graph_launches, illegal, memsets;
};
extern Counters counters;

extern std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- settings ------------------------------------------------------------------------------------------------------

int devices();       // STANDIN_DEVICES
int capability();    // STANDIN_CC: 80, 90, 100, 120
int processors();    // STANDIN_SMS
size_t total();      // STANDIN_MIB, in bytes; an H200 says 139.8 GiB
bool folds_large();  // STANDIN_FOLD: large allocations share 64 MiB, for kernels that do nothing
int shared_memory(); // of a block that asks for the most
std::string name();  // says that it is a stand-in

// Appends a line to the file STANDIN_LOG; nothing without one.
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- the hook ------------------------------------------------------------------------------------------------------

enum What { CAPTURE_BEGINS = 1, CAPTURE_ENDS, GRAPH_LAUNCHED, RUNTIME_LAUNCH, DRIVER_LAUNCH };
// Tells graphs.py; a broken capture ends with minus its number.
void tell(What what, long long number, const char* name);

// ---- state ---------------------------------------------------------------------------------------------------------

struct Graph {
  long long number;
};
struct Stream {
  int device;
  int priority = 0;
  unsigned flags = 0;
  Graph* graph = nullptr; // that it is captured into
  bool broken = false;
  cudaStreamCaptureMode how = cudaStreamCaptureModeGlobal;
};

extern thread_local int current; // device
extern thread_local CUcontext context;
extern thread_local cudaStreamCaptureMode mode;
extern std::set<Stream*> capturing;

CUcontext context_of(int device);
Stream* stream_of(cudaStream_t stream);
cudaError_t returned(cudaError_t error); // remembers an error for cudaGetLastError
cudaError_t illegal(const char* what);   // breaks all captures, and counts
bool unsafe();                           // whether a call is made that no capture may see

bool is_device(const void* pointer);

} // namespace device
