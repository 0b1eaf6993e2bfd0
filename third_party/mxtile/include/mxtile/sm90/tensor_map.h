// Host side: 2-D tensor maps, encoded by the driver function that the runtime finds. Nothing links
// libcuda, so the code loads on a machine without a driver and answers false there.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mxtile::sm90 {

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encode = [] {
    void* fn = nullptr;
    cudaDriverEntryPointQueryResult found{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      return PFN_cuTensorMapEncodeTiled_v12000{nullptr};
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(fn);
  }();
  return encode;
}

// Tiles of box_outer rows of 128 bytes, under the 128-byte swizzle, or of 64 bytes under the
// 64-byte swizzle, of a row-major [outer, inner] array whose rows lie `pitch` bytes apart (a
// multiple of 16, as is the address). Elements outside the array read as zero and are not written.
inline bool tensor_map_2d(CUtensorMap& map, CUtensorMapDataType type, int element_bytes,
                          const void* base, int64_t outer, int64_t inner, int64_t pitch,
                          int box_outer, int row_bytes = 128) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(outer)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(pitch)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(row_bytes / element_bytes),
                             static_cast<cuuint32_t>(box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  return encode(&map, type, 2, const_cast<void*>(base), dims, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Boxes of `whole`, and a box of the rows behind the last whole one, if there are: the copy engine
// takes longer for rows that are not there than for those that are (NVIDIA H200, 128 rows of 128
// bytes from L2: 111 ns, 600 ns where 4 to 32 of them are there, 111 ns for these alone).
struct TensorMaps {
  CUtensorMap whole, end;
};
inline bool tensor_maps_2d(TensorMaps& maps, CUtensorMapDataType type, int element_bytes,
                           const void* base, int64_t outer, int64_t inner, int64_t pitch,
                           int box_outer, int row_bytes = 128) {
  const auto make = [&](CUtensorMap& map, int box) {
    return tensor_map_2d(map, type, element_bytes, base, outer, inner, pitch, box, row_bytes);
  };
  if (!make(maps.whole, box_outer)) return false;
  maps.end = maps.whole;
  const int left = static_cast<int>(outer % box_outer);
  return left == 0 || make(maps.end, left);
}

}  // namespace mxtile::sm90
