// The part of the CUDA runtime, cuBLAS and NCCL that torch calls, without a device. Device memory is host memory, copies
// happen at once, and kernels are checked for their launch configuration and not run. build.py adds a stub for each
// other function of these libraries that torch is linked against.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kDeviceBytes = size_t{79} << 30;
constexpr int kCudaVersion = 13000;
constexpr int kNcclVersion = 22809;
constexpr unsigned kMaxSharedBytes = 232448;
const char kName[] = "NVIDIA H100 80GB HBM3";

enum class Kind { pageable, pinned, device };

struct Block {
    size_t bytes;
    Kind kind;
};

std::mutex mutex;
std::map<const char*, Block> blocks;
size_t used = 0;
std::atomic<long> copies_to_device{0}, copies_to_host{0}, pageable_copies{0}, waits{0};
std::atomic<uintptr_t> last_handle{0x1000};

int device_count() {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return visible != nullptr && *visible == '\0' ? 0 : 1;
}

Kind kind_of(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto next = blocks.upper_bound(static_cast<const char*>(pointer));
    if (next == blocks.begin()) return Kind::pageable;
    const auto& [start, block] = *--next;
    return static_cast<const char*>(pointer) < start + block.bytes ? block.kind : Kind::pageable;
}

cudaError_t allocate(void** pointer, size_t bytes, Kind kind) {
    size_t rounded = (bytes + kPage) / kPage * kPage;
    std::lock_guard<std::mutex> lock(mutex);
    if (kind == Kind::device && used + rounded > kDeviceBytes) return cudaErrorMemoryAllocation;
    // not reserved: reads as zeros and takes memory when it is written
    void* found = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return cudaErrorMemoryAllocation;
    blocks[static_cast<char*>(found)] = {rounded, kind};
    if (kind == Kind::device) used += rounded;
    *pointer = found;
    return cudaSuccess;
}

cudaError_t release(void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(static_cast<char*>(pointer));
    if (found == blocks.end()) return pointer == nullptr ? cudaSuccess : cudaErrorInvalidValue;
    munmap(pointer, found->second.bytes);
    if (found->second.kind == Kind::device) used -= found->second.bytes;
    blocks.erase(found);
    return cudaSuccess;
}

cudaError_t copy(void* target, const void* source, size_t bytes) {
    Kind to = kind_of(target), from = kind_of(source);
    if (to == Kind::device && from != Kind::device) ++copies_to_device;
    if (from == Kind::device && to != Kind::device) ++copies_to_host;
    if ((to == Kind::device) != (from == Kind::device) && (to == Kind::pageable || from == Kind::pageable))
        ++pageable_copies;
    std::memmove(target, source, bytes);
    return cudaSuccess;
}

template <typename Handle>
cudaError_t new_handle(Handle* handle) {
    *handle = reinterpret_cast<Handle>(last_handle += 16);
    return cudaSuccess;
}

cudaError_t check_launch(dim3 grid, dim3 block, size_t shared) {
    unsigned threads = block.x * block.y * block.z;
    bool fits = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.y <= 65535 && grid.z <= 65535 && threads > 0 &&
                threads <= 1024 && shared <= kMaxSharedBytes;
    if (fits) return cudaSuccess;
    std::fprintf(stderr, "null GPU: impossible launch, grid %u %u %u, block %u %u %u, shared memory %zu\n", grid.x,
                 grid.y, grid.z, block.x, block.y, block.z, shared);
    return cudaErrorInvalidConfiguration;
}

}  // namespace

// For tests: counters since the start of the process.
EXPORT long null_gpu_copies_to_device() { return copies_to_device; }
EXPORT long null_gpu_copies_to_host() { return copies_to_host; }
EXPORT long null_gpu_pageable_copies() { return pageable_copies; }
EXPORT long null_gpu_waits() { return waits; }

// Device

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
    *count = device_count();
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
}
EXPORT cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
    return device >= 0 && device < device_count() ? cudaSuccess : cudaErrorInvalidDevice;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
    *version = kCudaVersion;
    return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = kCudaVersion;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetLastError() { return cudaSuccess; }
EXPORT cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
EXPORT const char* cudaGetErrorString(cudaError_t) { return "an error of the null GPU"; }
EXPORT const char* cudaGetErrorName(cudaError_t) { return "an error of the null GPU"; }
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    std::strcpy(properties->name, kName);
    properties->major = 9;
    properties->minor = 0;
    properties->totalGlobalMem = kDeviceBytes;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->regsPerBlock = 65536;
    properties->regsPerMultiprocessor = 65536;
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = kMaxSharedBytes;
    properties->sharedMemPerMultiprocessor = 233472;
    properties->l2CacheSize = 50 << 20;
    properties->memoryBusWidth = 5120;
    properties->textureAlignment = 512;
    const int grid[] = {2147483647, 65535, 65535}, block[] = {1024, 1024, 64};
    std::memcpy(properties->maxGridSize, grid, sizeof grid);
    std::memcpy(properties->maxThreadsDim, block, sizeof block);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
        case cudaDevAttrWarpSize: *value = properties.warpSize; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = properties.maxBlocksPerMultiProcessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kMaxSharedBytes; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[1]; break;
        case cudaDevAttrMaxBlockDimX: *value = properties.maxThreadsDim[0]; break;
        case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = properties.memoryBusWidth; break;
        case cudaDevAttrClockRate: *value = 1980000; break;
        case cudaDevAttrMemoryClockRate: *value = 2619000; break;
        default: *value = 0;
    }
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int) {
    std::snprintf(text, length, "0000:00:00.0");
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() {
    ++waits;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
    *entry = nullptr;
    if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// The driver, opened as libcuda.so.1

EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuCtxGetCurrent(void** context) {
    *context = reinterpret_cast<void*>(16);
    return 0;
}
EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return 0;
}

// Memory

EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes, Kind::device); }
EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    return allocate(pointer, bytes, Kind::pinned);
}
EXPORT cudaError_t cudaFree(void* pointer) { return release(pointer); }
EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }
EXPORT cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }
EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
    std::lock_guard<std::mutex> lock(mutex);
    blocks[static_cast<char*>(pointer)] = {bytes, Kind::pinned};
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    blocks.erase(static_cast<char*>(pointer));
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    std::lock_guard<std::mutex> lock(mutex);
    *free = kDeviceBytes - used;
    *total = kDeviceBytes;
    return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    Kind kind = kind_of(pointer);
    *attributes = {};
    attributes->type = kind == Kind::device   ? cudaMemoryTypeDevice
                       : kind == Kind::pinned ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
    attributes->device = kind == Kind::device ? 0 : -1;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
    return copy(target, source, bytes);
}
EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    return copy(target, source, bytes);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                                     size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
    for (size_t row = 0; row < height; ++row)
        std::memmove(static_cast<char*>(target) + row * target_pitch,
                     static_cast<const char*>(source) + row * source_pitch, width);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
EXPORT cudaError_t cudaMemset(void* target, int value, size_t bytes) {
    std::memset(target, value, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
    return cudaMemset(target, value, bytes);
}
EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
    static char symbols[1 << 20];
    *pointer = symbols;
    return cudaSuccess;
}

// Streams and events: all work is done when it is queued

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_handle(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return new_handle(stream); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) {
    ++waits;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                            size_t* count) {
    *status = cudaStreamCaptureStatusNone;
    if (id != nullptr) *id = 0;
    if (count != nullptr) *count = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) {
    call(data);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return new_handle(event); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return new_handle(event); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 1.0f;
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) {
    ++waits;
    return cudaSuccess;
}

// Kernels

EXPORT cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
    return check_launch(grid, block, shared);
}
EXPORT cudaError_t __cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
    return check_launch(grid, block, shared);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
    return check_launch(config->gridDim, config->blockDim, config->dynamicSmemBytes);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void*, dim3 grid, dim3 block, void**, size_t shared,
                                               cudaStream_t) {
    return check_launch(grid, block, shared);
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
    bool too_large = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > int(kMaxSharedBytes);
    return too_large ? cudaErrorInvalidValue : cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks_, const void*, int, size_t) {
    *blocks_ = 2;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks_, const void*, int, size_t,
                                                                          unsigned) {
    *blocks_ = 2;
    return cudaSuccess;
}

// cuBLAS: matrix products succeed and compute nothing

namespace {
int new_object(void** object) {
    *object = std::calloc(1, 1024);
    return 0;
}
}  // namespace

EXPORT int cublasCreate_v2(void** handle) { return new_object(handle); }
EXPORT int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
EXPORT size_t cublasLtGetVersion() { return 130100; }
EXPORT int cublasLtMatmulDescCreate(void** object, int, int) { return new_object(object); }
EXPORT int cublasLtMatmulPreferenceCreate(void** object) { return new_object(object); }
EXPORT int cublasLtMatrixLayoutCreate(void** object, int, unsigned long, unsigned long, long) {
    return new_object(object);
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results,
                                          int* count) {
    std::memset(results, 0, 96);
    *count = 1;
    return 0;
}

// NCCL with one rank: what it sends is what it receives

struct UniqueId {
    char bytes[128];
};

namespace {
int nccl_copy(const void* source, void* target, size_t count, int type) {
    const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    if (source != target) std::memmove(target, source, count * sizes[type]);
    return 0;
}
int new_communicator(int num_ranks, void** communicator) {
    return num_ranks == 1 ? new_object(communicator) : 3;  // ncclInternalError
}
}  // namespace

EXPORT int ncclGetVersion(int* version) {
    *version = kNcclVersion;
    return 0;
}
EXPORT const char* ncclGetErrorString(int) { return "an error of the null GPU"; }
EXPORT const char* ncclGetLastError(void*) { return "an error of the null GPU"; }
EXPORT int ncclGetUniqueId(UniqueId* id) {
    std::memset(id, 7, sizeof *id);
    return 0;
}
EXPORT int ncclCommInitRank(void** communicator, int num_ranks, UniqueId, int) {
    return new_communicator(num_ranks, communicator);
}
EXPORT int ncclCommInitRankConfig(void** communicator, int num_ranks, UniqueId, int, void*) {
    return new_communicator(num_ranks, communicator);
}
EXPORT int ncclCommSplit(void*, int, int, void** communicator, void*) { return new_object(communicator); }
EXPORT int ncclCommCount(void*, int* count) {
    *count = 1;
    return 0;
}
EXPORT int ncclCommUserRank(void*, int* rank) { return *rank = 0; }
EXPORT int ncclCommGetAsyncError(void*, int* error) { return *error = 0; }
EXPORT int ncclCommRegister(void*, void*, size_t, void** handle) { return new_object(handle); }
EXPORT int ncclAllReduce(const void* source, void* target, size_t count, int type, int, void*, cudaStream_t) {
    return nccl_copy(source, target, count, type);
}
EXPORT int ncclAllGather(const void* source, void* target, size_t count, int type, void*, cudaStream_t) {
    return nccl_copy(source, target, count, type);
}
EXPORT int ncclReduceScatter(const void* source, void* target, size_t count, int type, int, void*, cudaStream_t) {
    return nccl_copy(source, target, count, type);
}
EXPORT int ncclBroadcast(const void* source, void* target, size_t count, int type, int, void*, cudaStream_t) {
    return nccl_copy(source, target, count, type);
}
EXPORT int ncclReduce(const void* source, void* target, size_t count, int type, int, int, void*, cudaStream_t) {
    return nccl_copy(source, target, count, type);
}
EXPORT int ncclRedOpCreatePreMulSum(int* operation, void*, int, int, void*) {
    *operation = 5;
    return 0;
}
