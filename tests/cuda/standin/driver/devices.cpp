#include "device.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <utility>

namespace device {

thread_local int current = 0;
thread_local CUcontext context = nullptr;

namespace {
thread_local cudaError_t last = cudaSuccess;
constexpr uintptr_t CONTEXTS = 0x1000;
constexpr int VERSION = 13020;
} // namespace

CUcontext context_of(int device) {
  return (CUcontext)(CONTEXTS + device);
}

cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

} // namespace device

using namespace device;

extern "C" {

// ---- the runtime ---------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* number) {
  *number = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
  if (number < 0 || number >= devices()) return returned(cudaErrorInvalidDevice);
  current = number;
  context = context_of(number);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int number) {
  std::memset(p, 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "%s", name().c_str());
  p->uuid.bytes[0] = (char)number;
  p->pciBusID = number + 1;
  p->major = capability() / 10;
  p->minor = capability() % 10;
  p->totalGlobalMem = total();
  p->multiProcessorCount = processors();
  p->warpSize = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = shared_memory();
  p->sharedMemPerMultiprocessor = shared_memory() + 1024;
  p->reservedSharedMemPerBlock = 1024;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = capability() == 120 ? 1536 : 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = 60 << 20;
  p->memoryBusWidth = 6144;
  p->memPitch = 2147483647;
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->asyncEngineCount = 3;
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
  p->streamPrioritiesSupported = p->managedMemory = p->cooperativeLaunch = p->hostRegisterSupported = 1;
  p->clusterLaunch = capability() >= 90;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int number) {
  bool found = cuDeviceGetAttribute(value, (CUdevice_attribute)which, number) == CUDA_SUCCESS;
  return found ? cudaSuccess : returned(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int number) {
  std::snprintf(text, size, "0000:%02x:00.0", number + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (unsafe()) return illegal("cudaDeviceSynchronize");
  counters.device_syncs++;
  log("sync device");
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    default: return "an error of the stand-in device";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[96];
  std::snprintf(text, sizeof text, "stand-in device: error %d, %s", (int)error, cudaGetErrorName(error));
  return text;
}

cudaError_t cudaGetLastError() {
  return std::exchange(last, cudaSuccess);
}

cudaError_t cudaPeekAtLastError() {
  return last;
}

cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}

cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *found = nullptr;
  for (const char* suffix : {"_v2", "_v3", ""})
    if (!*found) *found = dlsym(RTLD_DEFAULT, (std::string(symbol) + suffix).c_str());
  if (result) *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*found) log("no entry point of the driver: %s", symbol);
  return cudaSuccess;
}

// ---- the driver ----------------------------------------------------------------------------------------------------

CUresult cuInit(unsigned) {
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* found, int number) {
  if (number >= devices()) return CUDA_ERROR_INVALID_DEVICE;
  *found = number;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = devices();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* text, int size, CUdevice) {
  std::snprintf(text, size, "%s", name().c_str());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability() / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability() % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = processors(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared_memory(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = shared_memory() + 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = capability() == 120 ? 1536 : 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 3201000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 6144; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 60 << 20; break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice number) {
  *found = context_of(number);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* found) {
  *found = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext given) {
  context = given;
  if (given) current = (int)((uintptr_t)given - CONTEXTS);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* number) {
  *number = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext given) {
  return cuCtxSetCurrent(given);
}

CUresult cuCtxPopCurrent(CUcontext* found) {
  if (found) *found = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit, size_t) {
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  static thread_local char buffer[64];
  std::snprintf(buffer, sizeof buffer, "stand-in device: driver error %d", (int)error);
  *text = buffer;
  return CUDA_SUCCESS;
}
}
