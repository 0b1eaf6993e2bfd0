// The GEMM's entry point: argument checks, configuration, launch, and the reduction of
// bias-gradient partials.
#include <iterator>

#include "common/formats.h"
#include "common/launch.h"
#include "gemm/gemm_launch.h"
#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/tensor_map.h"
#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

namespace {

using Launch = Status (*)(const GemmArgs&, const Device&);
constexpr Launch kDense[] = {launch_192x128_cluster2, launch_256x128_cluster2, launch_128x128,
                             launch_64x128};
constexpr Launch kTileFactors[] = {launch_tile_factors_192x128_cluster2,
                                   launch_tile_factors_256x128_cluster2};
constexpr Launch kRowFactors[] = {launch_row_factors_192x128_cluster2,
                                  launch_row_factors_256x128_cluster2};
constexpr Launch kSplit[] = {launch_split_128x128, launch_split_64x128};
constexpr int kConfigs = std::size(kDense);
static_assert(kConfigs == std::size(kDenseTiles) && std::size(kSplit) == std::size(kSplitTiles) &&
              std::size(kTileFactors) == std::size(kTileFactorTiles) &&
              std::size(kRowFactors) == std::size(kRowFactorTiles));

// The configurations for the scales of the operands.
struct Configs {
  const Launch* launch;
  const int* tiles;
  int count;

  bool has(int config, bool full) const {
    return config < count && (config < 0 || !full || kGemmTiles[tiles[config]].full);
  }
};

Configs configs_for(const GemmArgs& a) {
  if (!is_blockwise(a.lhs.scaling)) return {kDense, kDenseTiles, kConfigs};
  if (a.rhs.scaling.block_rows == 1)
    return {kRowFactors, kRowFactorTiles, static_cast<int>(std::size(kRowFactors))};
  return {kTileFactors, kTileFactorTiles, static_cast<int>(std::size(kTileFactors))};
}

int choose(const GemmArgs& a, const Configs& configs, int sms) {
  return choose_config(configs.tiles, configs.count, a.lhs.rows, a.rhs.rows, needs_full(a.epilogue),
                       sms);
}

constexpr int kReducers = 16;  // threads of a column, each of which sums every sixteenth block

__global__ void reduce_columns_kernel(const float* partial, float* out, int64_t blocks, int64_t n) {
  __shared__ float sums[kReducers][32];
  tile::await_predecessors();
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  float s = 0.0f;
  if (col < n) {
#pragma unroll 8
    for (int64_t b = threadIdx.y; b < blocks; b += kReducers) s += partial[b * n + col];
  }
  sums[threadIdx.y][threadIdx.x] = s;
  __syncthreads();
  if (threadIdx.y != 0 || col >= n) return;
  for (int i = 1; i < kReducers; ++i) s += sums[i][threadIdx.x];
  out[col] = s;
}

}  // namespace

Status ClusterCount::of(int device, const void* kernel, int threads, int smem, int cluster,
                        int& count) {
  std::atomic<int>& known = counts_[device & 63];
  count = known.load(std::memory_order_relaxed);
  if (count != 0) return Status::ok;
  Status status = allow_smem(kernel);
  if (status != Status::ok) return status;
  cudaLaunchAttribute attribute = clusters_of(cluster);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  config.attrs = &attribute;
  config.numAttrs = 1;
  status = started(cudaOccupancyMaxActiveClusters(&count, kernel, &config));
  if (status != Status::ok) return status;
  known.store(count, std::memory_order_relaxed);
  return count == 0 ? Status::unsupported : Status::ok;
}

Status reduce_columns(const float* partial, float* out, int64_t blocks, int64_t n,
                      cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((n + 31) / 32)), block(32, kReducers);
  return launch_early(reduce_columns_kernel, {grid, block, stream}, partial, out, blocks, n);
}

int64_t workspace_bytes(const GemmArgs& a) {
  if (a.execution.parts > 1) return split_sums(a).bytes;
  return a.epilogue.bias_grad == nullptr ? 0 : (a.lhs.rows + 63) / 64 * a.rhs.rows * 4;
}

int config_count() { return kConfigs; }
bool config_full(int config) {
  return config >= 0 && config < kConfigs && kGemmTiles[kDenseTiles[config]].full;
}
const char* config_name(int config) {
  return config >= 0 && config < kConfigs ? kGemmTiles[kDenseTiles[config]].name : "";
}

int chosen_config(const GemmArgs& a) {
  return a.execution.kernel >= 0 ? a.execution.kernel
                                 : choose(a, configs_for(a), current_device().sms);
}

Status check_sides(const GemmArgs& a, Layout lhs, Layout rhs) {
  if (a.lhs.layout != lhs || a.rhs.layout != rhs) return Status::unsupported;
  if (is_blockwise(a.lhs.scaling) && is_blockwise(a.rhs.scaling)) {
    if (!known(a.lhs.element) || !known(a.rhs.element)) return Status::bad_argument;
    const bool takes = is_fp8(a.lhs.element) && a.rhs.element == Element::e4m3 &&
                       a.lhs.scaling.block_rows == 1 && a.execution.parts <= 1;
    return takes ? Status::ok : Status::unsupported;
  }
  const Status status = check_mx(a.lhs.element, a.lhs.scaling);
  if (status != Status::ok) return status;
  const Status of_rhs = check_mx(a.rhs.element, a.rhs.scaling);
  return of_rhs != Status::ok || is_of_weights(a.rhs.element) ? of_rhs : Status::unsupported;
}

Status check_epilogue(const Epilogue& e, int64_t n) {
  if (!known(e.out_dtype) || !known(e.bias_dtype) || !known(e.aux_dtype) ||
      !known(e.gelu_in_dtype) || e.ldo < n || (e.aux != nullptr && e.gelu_in != nullptr) ||
      (e.bias_grad_kind == BiasGrad::none) != (e.bias_grad == nullptr)) {
    return Status::bad_argument;
  }
  return e.bias_grad_kind == BiasGrad::operand ? Status::unsupported : Status::ok;
}

Status gemm(const GemmArgs& a) {
  const int64_t m = a.lhs.rows, n = a.rhs.rows, k = a.lhs.k;
  const int config = a.execution.kernel, parts = a.execution.parts;
  const Configs configs = configs_for(a);
  const bool stands = a.rhs.layout == Layout::standing && is_fp8(a.rhs.element);
  Status status = check_sides(a, Layout::tiles, stands ? Layout::standing : Layout::tiles);
  if (status == Status::ok) status = check_epilogue(a.epilogue, n);
  if (status != Status::ok) return status;
  if (m <= 0 || n <= 0 || k <= 0 || k != a.rhs.k || m > INT32_MAX - 256 || n > INT32_MAX - 256 ||
      k > INT32_MAX - 256 || !configs.has(config, needs_full(a.epilogue)) ||
      (parts > 1 && (config >= 0 || parts > (k + 127) / 128))) {
    return Status::bad_argument;
  }
  if (a.execution.workspace_bytes < workspace_bytes(a)) return Status::small_workspace;
  const Device device = current_device();
  if (device.sms == 0) return Status::unsupported;
  if (parts > 1) {
    if (adds_in_clusters(m, n, parts, device.sms)) return gemm_cluster(a, device);
    if (parts * split_sums(a).rows > INT32_MAX) return Status::unsupported;
    status = kSplit[split_config(m)](a, device);
    return status == Status::ok ? finish_split(a) : status;
  }
  status = configs.launch[config >= 0 ? config : choose(a, configs, device.sms)](a, device);
  if (status != Status::ok || a.epilogue.bias_grad == nullptr) return status;
  return reduce_columns(static_cast<const float*>(a.execution.workspace), a.epilogue.bias_grad,
                        (m + 63) / 64, n, static_cast<cudaStream_t>(a.execution.stream));
}

bool available() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9 && mxtile::sm90::tensor_map_encoder() != nullptr;
}

}  // namespace te_mx::sm90
