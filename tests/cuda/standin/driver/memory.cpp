#include "device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

namespace device {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t GRANULE = 2 << 20; // what allocations are aligned to
constexpr size_t FOLD = 64 << 20;

struct Allocation {
  void* base; // that is unmapped, or freed on the host
  size_t mapped, size;
  int device;
  bool host;
};
std::map<char*, Allocation> allocations; // by the end of the pointer's range
std::map<char*, size_t> reserved;        // ranges of expandable segments, by their end

void count_bytes(long long size) {
  (size > 0 ? counters.mallocs : counters.frees)++;
  counters.bytes += size;
  counters.peak = std::max(counters.peak, counters.bytes);
}

char* map_aligned(size_t size, int protection, void** base) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *base = mmap(nullptr, size + GRANULE, protection, flags, -1, 0);
  if (*base == MAP_FAILED) return nullptr;
  return (char*)(((uintptr_t)*base + GRANULE - 1) / GRANULE * GRANULE);
}

// One piece of memory again and again, where the values mean nothing: tensors of any size fit into the host.
void fold(char* begin, size_t size) {
  static int file = [] {
    int made = memfd_create("standin", 0);
    return made >= 0 && ftruncate(made, FOLD) == 0 ? made : -1;
  }();
  for (size_t at = 0; file >= 0 && at < size; at += FOLD)
    mmap(begin + at, std::min(FOLD, size - at), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
}

cudaError_t take_device(void** pointer, size_t size) {
  Lock lock(mutex);
  *pointer = nullptr;
  if (size == 0) return cudaSuccess;
  if (counters.bytes + size > total()) {
    log("out of memory: %zu", size);
    return returned(cudaErrorMemoryAllocation);
  }
  void* base;
  size_t mapped = (size + PAGE - 1) / PAGE * PAGE;
  char* begin = map_aligned(mapped, PROT_READ | PROT_WRITE, &base);
  if (!begin) return returned(cudaErrorMemoryAllocation);
  if (folds_large() && size >= FOLD) fold(begin, mapped);
  *pointer = begin;
  allocations[begin + size] = {base, mapped + GRANULE, size, current, false};
  count_bytes((long long)size);
  return cudaSuccess;
}

cudaError_t take_host(void** pointer, size_t size) {
  Lock lock(mutex);
  size = std::max<size_t>(size, 1);
  if (posix_memalign(pointer, PAGE, size)) return returned(cudaErrorMemoryAllocation);
  allocations[(char*)*pointer + size] = {*pointer, size, size, current, true};
  return cudaSuccess;
}

std::map<char*, Allocation>::iterator found(const void* pointer) {
  auto it = allocations.upper_bound((char*)pointer);
  bool inside = it != allocations.end() && it->first - it->second.size <= (char*)pointer;
  return inside ? it : allocations.end();
}

cudaError_t give(void* pointer) {
  if (!pointer) return cudaSuccess;
  Lock lock(mutex);
  auto it = found(pointer);
  if (it == allocations.end() || it->first - it->second.size != (char*)pointer)
    return returned(cudaErrorInvalidValue);
  if (it->second.host) {
    std::free(pointer);
  } else {
    munmap(it->second.base, it->second.mapped);
    count_bytes(-(long long)it->second.size);
  }
  allocations.erase(it);
  return cudaSuccess;
}

void copy(void* into, const void* from, size_t size) {
  bool to_device = is_device(into), of_device = is_device(from);
  (to_device && of_device ? counters.d2d : to_device ? counters.h2d : counters.d2h)++;
  std::memmove(into, from, size);
}

cudaError_t fill(void* into, int value, size_t size) {
  counters.memsets++;
  std::memset(into, value, size);
  return cudaSuccess;
}

} // namespace

bool is_device(const void* pointer) {
  Lock lock(mutex);
  auto it = found(pointer);
  if (it != allocations.end()) return !it->second.host;
  auto range = reserved.upper_bound((char*)pointer);
  return range != reserved.end() && range->first - range->second <= (char*)pointer;
}

} // namespace device

using namespace device;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (unsafe()) return illegal("cudaMalloc");
  log("malloc %zu", size);
  return take_device(pointer, size);
}

cudaError_t cudaFree(void* pointer) {
  return pointer && unsafe() ? illegal("cudaFree") : give(pointer);
}

cudaError_t cudaMallocHost(void** pointer, size_t size) {
  return unsafe() ? illegal("cudaMallocHost") : take_host(pointer, size);
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  return unsafe() ? illegal("cudaHostAlloc") : take_host(pointer, size);
}

cudaError_t cudaFreeHost(void* pointer) {
  return give(pointer);
}

cudaError_t cudaHostRegister(void*, size_t, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void*) {
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  *all = total();
  *free = total() - counters.bytes;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* into, const void* from, size_t size, cudaMemcpyKind) {
  if (unsafe()) return illegal("cudaMemcpy");
  counters.stream_syncs++;
  log("copy that waits: %zu", size);
  copy(into, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* into, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  log("copy %zu", size);
  copy(into, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* into, int, const void* from, int, size_t size, cudaStream_t) {
  copy(into, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* into, int value, size_t size) {
  return fill(into, value, size);
}

cudaError_t cudaMemsetAsync(void* into, int value, size_t size, cudaStream_t) {
  return fill(into, value, size);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Lock lock(mutex);
  std::memset(attributes, 0, sizeof *attributes);
  auto it = found(pointer);
  bool known = it != allocations.end(), on_device = is_device(pointer);
  attributes->type = on_device ? cudaMemoryTypeDevice : known ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  attributes->device = !on_device ? -1 : known ? it->second.device : current;
  (on_device ? attributes->devicePointer : attributes->hostPointer) = (void*)pointer;
  return cudaSuccess;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr pointer) {
  if (!is_device((void*)pointer)) {
    log("a kernel is given a POINTER that is not of the device");
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr*)value = pointer;
  else
    *(int*)value = 0;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* size, CUdeviceptr pointer) {
  Lock lock(mutex);
  auto it = found((void*)pointer);
  if (it == allocations.end()) return CUDA_ERROR_NOT_FOUND;
  if (size) *size = it->second.size;
  if (begin) *begin = (CUdeviceptr)(it->first - it->second.size);
  return CUDA_SUCCESS;
}

// ---- expandable segments -------------------------------------------------------------------------------------------

CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = GRANULE;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t, CUdeviceptr, unsigned long long) {
  void* base;
  char* begin = map_aligned(size, PROT_NONE, &base);
  if (!begin) return CUDA_ERROR_OUT_OF_MEMORY;
  Lock lock(mutex);
  *pointer = (CUdeviceptr)begin;
  reserved[begin + size] = size;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  Lock lock(mutex);
  reserved.erase((char*)pointer + size);
  munmap((void*)pointer, size);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*,
                     unsigned long long) {
  Lock lock(mutex);
  if (counters.bytes + size > total()) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUmemGenericAllocationHandle) new size_t(size);
  count_bytes((long long)size);
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Lock lock(mutex);
  count_bytes(-(long long)*(size_t*)handle);
  delete (size_t*)handle;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  mprotect((void*)pointer, size, PROT_READ | PROT_WRITE);
  if (folds_large() && size > GRANULE) fold((char*)pointer, size); // that of small tensors grows by granules
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  mmap((void*)pointer, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
}
