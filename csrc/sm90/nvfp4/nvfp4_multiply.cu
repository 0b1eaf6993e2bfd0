// Products of what bf16 holds of NVFP4, with the factor of tensor scales on the device: by cublasLt
// of the process, if there is one, which torch has loaded. Its few functions and numbers stand
// here, so that nothing is linked and nothing is needed to build.
#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>

#include "common/formats.h"
#include "common/launch.h"
#include "mxtile/sm90/barrier.cuh"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

namespace {

// cublasLt.h of CUDA 12 and 13.
using Handle = void*;
using Object = void*;
constexpr int kFloat32 = 0, kBfloat16 = 14, kCompute32 = 68;              // types
constexpr int kPointerMode = 2, kTransA = 3, kTransB = 4, kEpilogue = 7;  // of a product
constexpr int kBias = 8, kBiasType = 26;
constexpr int kOnDevice = 1, kTransposed = 1, kWithBias = 4;
constexpr int kMostWorkspace = 1;                               // of a preference
constexpr size_t kFactors = 256, kWorkspace = size_t{8} << 20;  // bytes
struct Found {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

struct Library {
  int (*create)(Handle*);
  int (*product)(Object*, int, int);
  int (*drop_product)(Object);
  int (*set)(Object, int, const void*, size_t);
  int (*matrix)(Object*, int, uint64_t, uint64_t, int64_t);
  int (*drop_matrix)(Object);
  int (*preference)(Object*);
  int (*drop_preference)(Object);
  int (*prefer)(Object, int, const void*, size_t);
  int (*find)(Handle, Object, Object, Object, Object, Object, Object, int, Found*, int*);
  int (*multiply)(Handle, Object, const void*, const void*, Object, const void*, Object,
                  const void*, const void*, Object, void*, Object, const uint64_t*, void*, size_t,
                  void*);
  bool there = false;

  Library() {
    void* lib = nullptr;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
      if (lib == nullptr) lib = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (lib == nullptr) return;
    const auto take = [lib](auto& f, const char* name) {
      f = reinterpret_cast<std::remove_reference_t<decltype(f)>>(dlsym(lib, name));
      return f != nullptr;
    };
    there = take(create, "cublasLtCreate") && take(product, "cublasLtMatmulDescCreate") &&
            take(drop_product, "cublasLtMatmulDescDestroy") &&
            take(set, "cublasLtMatmulDescSetAttribute") &&
            take(matrix, "cublasLtMatrixLayoutCreate") &&
            take(drop_matrix, "cublasLtMatrixLayoutDestroy") &&
            take(preference, "cublasLtMatmulPreferenceCreate") &&
            take(drop_preference, "cublasLtMatmulPreferenceDestroy") &&
            take(prefer, "cublasLtMatmulPreferenceSetAttribute") &&
            take(find, "cublasLtMatmulAlgoGetHeuristic") && take(multiply, "cublasLtMatmul");
  }
};

const Library& library() {
  static const Library lib;
  return lib;
}

// What a product describes to the library, and how this runs it.
struct Described {
  Object product = nullptr, a = nullptr, b = nullptr, d = nullptr;
  Handle handle = nullptr;
  Found found{};
};

// Handles of devices, and descriptions of sizes, which stay: making one takes as long as a launch.
struct Known {
  std::mutex mutex;
  std::map<int, Handle> handles;
  std::map<std::array<int64_t, 6>, Described> described;
};

// Those of a product without its bias, but for the algorithm; false where the library has none.
bool describe(const Nvfp4MultiplyArgs& of, int device, Known& known, Described& to) {
  const Library& lib = library();
  const int64_t of_lhs = of.lhs_k_first ? of.m : of.k, of_rhs = of.rhs_k_first ? of.n : of.k;
  const auto set = [&](int attribute, int value) {
    return lib.set(to.product, attribute, &value, sizeof value) == 0;
  };
  // Of matrices whose columns are contiguous: D^T [n, m] = rhs [n, k] lhs^T [k, m].
  const int type = of.out_dtype == DType::f32 ? kFloat32 : kBfloat16;
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  if (lib.product(&to.product, kCompute32, kFloat32) != 0 ||
      lib.matrix(&to.a, kBfloat16, u(of_rhs), u(of.rhs_k_first ? of.k : of.n), of_rhs) != 0 ||
      lib.matrix(&to.b, kBfloat16, u(of_lhs), u(of.lhs_k_first ? of.k : of.m), of_lhs) != 0 ||
      lib.matrix(&to.d, type, u(of.n), u(of.m), of.ldo) != 0 || !set(kPointerMode, kOnDevice) ||
      !set(kTransA, of.rhs_k_first ? 0 : kTransposed) ||
      !set(kTransB, of.lhs_k_first ? kTransposed : 0) ||
      (of.bias != nullptr && (!set(kEpilogue, kWithBias) || !set(kBiasType, kBfloat16) ||
                              lib.set(to.product, kBias, &of.bias, sizeof of.bias) != 0)))
    return false;
  Handle& own = known.handles[device];
  if (own == nullptr && lib.create(&own) != 0) return false;
  to.handle = own;
  Object wanted = nullptr;
  if (lib.preference(&wanted) != 0) return false;
  int count = 0;
  const uint64_t most = kWorkspace;
  const bool found =
      lib.prefer(wanted, kMostWorkspace, &most, sizeof most) == 0 &&
      lib.find(to.handle, to.product, to.a, to.b, to.d, to.d, wanted, 1, &to.found, &count) == 0 &&
      count > 0 && to.found.state == 0;
  lib.drop_preference(wanted);
  return found;
}

void drop(const Described& it) {
  const Library& lib = library();
  if (it.product != nullptr) lib.drop_product(it.product);
  for (Object one : {it.a, it.b, it.d})
    if (one != nullptr) lib.drop_matrix(one);
}

// run(description of a product); Status::unsupported where the library does not take it.
template <class Run>
Status with_description(const Nvfp4MultiplyArgs& of, Run run) {
  static Known known;
  constexpr size_t kMost = 1024;  // descriptions that are kept
  // Every row starts at whole 16 bytes.
  const auto whole = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  const int64_t of_lhs = of.lhs_k_first ? of.m : of.k, of_rhs = of.rhs_k_first ? of.n : of.k;
  if (!library().there || of_lhs % 8 != 0 || of_rhs % 8 != 0 || of.ldo % 8 != 0 || !whole(of.lhs) ||
      !whole(of.rhs) || !whole(of.out))
    return Status::unsupported;
  if (of.out_dtype == DType::f16 ||
      (of.bias != nullptr && (of.out_dtype != DType::bf16 || of.bias_dtype != DType::bf16)))
    return Status::unsupported;
  int device = 0;
  cudaGetDevice(&device);
  const auto bit = [](bool is, int at) { return int64_t{is} << at; };
  const std::array<int64_t, 6> key{of.m,
                                   of.n,
                                   of.k,
                                   of.ldo,
                                   device,
                                   bit(of.lhs_k_first, 0) | bit(of.rhs_k_first, 1) |
                                       bit(of.out_dtype == DType::f32, 2) |
                                       bit(of.bias != nullptr, 3) | bit(of.accumulate, 4)};
  const std::lock_guard lock(known.mutex);
  auto at = known.described.find(key);
  if (at == known.described.end()) {
    Described made;
    if (!describe(of, device, known, made)) {
      drop(made);
      made = {};
    }
    if (known.described.size() >= kMost) {
      for (const auto& [_, one] : known.described) drop(one);
      known.described.clear();
    }
    at = known.described.emplace(key, made).first;
  }
  const Described& it = at->second;
  if (it.product == nullptr) return Status::unsupported;
  if (of.bias != nullptr && library().set(it.product, kBias, &of.bias, sizeof of.bias) != 0)
    return Status::unsupported;
  return run(it);
}

__global__ void nvfp4_factors(const float* lhs, const float* rhs, float* factors, bool accumulate) {
  tile::let_dependents_start();
  tile::await_predecessors();
  factors[0] = (lhs == nullptr ? 1.0f : *lhs) * (rhs == nullptr ? 1.0f : *rhs);
  factors[1] = accumulate ? 1.0f : 0.0f;
}

}  // namespace

Status nvfp4_multiplies(const Nvfp4MultiplyArgs& a) {
  return with_description(a, [](const Described&) { return Status::ok; });
}

int64_t nvfp4_multiply_workspace() { return static_cast<int64_t>(kFactors + kWorkspace); }

Status nvfp4_multiply(const Nvfp4MultiplyArgs& a) {
  if (a.m < 1 || a.n < 1 || a.k < 1 || a.lhs == nullptr || a.rhs == nullptr || a.out == nullptr ||
      a.ldo < a.n || a.execution.workspace == nullptr ||
      a.execution.workspace_bytes < nvfp4_multiply_workspace())
    return Status::bad_argument;
  return with_description(a, [&a](const Described& it) {
    uint8_t* const room = static_cast<uint8_t*>(a.execution.workspace) + kFactors;
    const float* factors = a.factors;  // then what stands for false and for true
    const float* adds = factors == nullptr ? nullptr : factors + (a.accumulate ? 2 : 1);
    if (factors == nullptr) {
      auto* const made = static_cast<float*>(a.execution.workspace);
      factors = made, adds = made + 1;
      const Status status = launch_early(nvfp4_factors, {dim3(1), dim3(1), a.execution.stream},
                                         a.of_lhs, a.of_rhs, made, a.accumulate);
      if (status != Status::ok) return status;
    }
    const int failed = library().multiply(it.handle, it.product, factors, a.rhs, it.a, a.lhs, it.b,
                                          adds, a.out, it.d, a.out, it.d, it.found.algorithm, room,
                                          kWorkspace, a.execution.stream);
    return failed == 0 ? Status::ok : Status::unsupported;
  });
}

}  // namespace te_mx::sm90
