#include "device.h"

#include <cstring>
#include <map>
#include <vector>

namespace device {
namespace {

struct Function {
  std::string name;
};
struct Grid {
  unsigned x, y, z;
};
struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};

std::map<const void*, std::string> host_functions; // of torch's own kernels
thread_local std::vector<Configuration> configurations;

cudaError_t runtime_launch(const void* function) {
  Lock lock(mutex);
  counters.runtime_launches++;
  auto it = host_functions.find(function);
  const char* name = it == host_functions.end() ? "unknown" : it->second.c_str();
  log("a KERNEL of torch's, not run: %s", name);
  tell(RUNTIME_LAUNCH, 0, name);
  return cudaSuccess;
}

bool allowed(Grid grid, Grid block, unsigned shared) {
  bool some = grid.x && grid.y && grid.z;
  bool few = grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535 && block.x * block.y * block.z <= 1024;
  return some && few && (long)shared <= shared_memory();
}

CUresult driver_launch(CUfunction function, Grid grid, Grid block, unsigned shared, CUstream stream) {
  Lock lock(mutex);
  counters.driver_launches++;
  const char* name = ((Function*)function)->name.c_str();
  Stream* on = stream_of((cudaStream_t)stream);
  log("launch %s grid %u %u %u block %u shared %u device %d stream of %d%s", name, grid.x, grid.y, grid.z, block.x,
      shared, current, on->device, on->graph ? " captured" : "");
  if (on->device != current || !allowed(grid, block, shared)) {
    log("BAD LAUNCH: %s", name);
    counters.illegal++;
    return on->device != current ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
  }
  tell(DRIVER_LAUNCH, (long long)(uintptr_t)function, name);
  return CUDA_SUCCESS;
}

CUresult any_module(CUmodule* made) {
  *made = (CUmodule) new int(0);
  return CUDA_SUCCESS;
}

} // namespace
} // namespace device

using namespace device;

extern "C" {

// ---- the runtime: torch's own kernels ------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  Lock lock(mutex);
  host_functions[host] = name;
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *(void**)stream = last.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return runtime_launch(function);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return runtime_launch(kernel);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return runtime_launch(function);
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = capability();
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// ---- the driver: Triton's kernels ----------------------------------------------------------------------------------

CUresult cuModuleLoadData(CUmodule* made, const void*) {
  return any_module(made);
}

CUresult cuModuleLoadDataEx(CUmodule* made, const void*, unsigned, CUjit_option*, void**) {
  return any_module(made);
}

CUresult cuModuleLoad(CUmodule* made, const char*) {
  return any_module(made);
}

CUresult cuModuleUnload(CUmodule) {
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* made, CUmodule, const char* name) {
  *made = (CUfunction) new Function{name};
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) {
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void**, void**) {
  return driver_launch(f, {gx, gy, gz}, {bx, by, bz}, shared, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
  return driver_launch(f, {c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ},
                       c->sharedMemBytes, c->hStream);
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, CUstream stream, void**) {
  return driver_launch(f, {gx, gy, gz}, {bx, by, bz}, shared, stream);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 2;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
}
