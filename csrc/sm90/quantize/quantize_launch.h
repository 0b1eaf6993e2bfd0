// Host side that the quantizer shares with the fused steps that end in it.
#pragma once

#include <cuda_runtime_api.h>

#include "quantize/quantize_task.h"

namespace te_mx::sm90 {

struct QuantizeParams;

// When a kernel starts: after its predecessor, while that ends, or at once, beside it.
enum class Start { after, early, beside };

// The kernel's parameters for `a`, whose x need not be set. Sizes must not be 0.
Status quantize_params(const QuantizeTask& a, QuantizeParams& p);

// The same for rows that are cut into `row_tiles` tiles, with `k` codes in a row of the columns.
Status quantize_params(const QuantizeTask& a, int64_t row_tiles, int64_t k, QuantizeParams& p);

// The grid of the tiles in the first `col_tiles` columns of tiles, as find_tile() walks it. The
// last dimension counts matrices, or what a dimension cannot hold.
dim3 tile_grid(const QuantizeParams& p, int col_tiles, int64_t matrices = 1);

// Whether the kernel instance for plain codes is needed.
bool wants_plain(const QuantizeParams& p);

// The quantizer with what rounds_plainly() does not know, of one matrix or of groups of its rows,
// to which transforms and blocks are confined; numbers of elements are those of x. Of groups it
// leaves partial sums.
Status quantize_randomly(const QuantizeTask& a, const QuantizeOut& to,
                         const Groups* groups = nullptr);

// The quantizer to codes with fp32 factors, for a task whose scales are those that `to` asks for;
// the same of groups of rows, and of several matrices (te_mx/sm90.h).
Status quantize_factors(const QuantizeTask& a, const QuantizeOut& to, Start start);
Status quantize_grouped_factors(const QuantizeTask& a, const GroupedQuantizeArgs& args);
Status quantize_stacked_factors(const QuantizeTask& a, const QuantizeOut& to, const void* const* xs,
                                int64_t count);

// ok, or what is wrong with groups whose rows are those of a task.
Status check_groups(const QuantizeTask& a, const Groups& groups);

// out[group, col] = sum over the group's tiles of what a task left of them.
Status launch_group_sums(const QuantizeTask& a, const Groups& groups);

// out[col] = sum over `tiles` of partial[tile, col], in an order that only sizes decide.
Status launch_sums(const float* partial, void* out, DType out_dtype, int64_t tiles, int64_t cols,
                   cudaStream_t stream);
// The same of partial[tile, 2, cols] to two outputs, the second of which may be null.
Status launch_two_sums(const float* partial, void* first, void* second, DType out_dtype,
                       int64_t tiles, int64_t cols, cudaStream_t stream);

}  // namespace te_mx::sm90
