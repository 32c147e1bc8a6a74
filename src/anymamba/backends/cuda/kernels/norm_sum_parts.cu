// The last step of a norm's backward: adds the walkers' sums of a weight's or a bias's gradient, in a fixed order.
//
// Threads   A block has 8 columns (a sector of 32 bytes) and 64 threads along the parts of each, so that few reads follow one
//           another; a warp adds its 4 by shuffles, the warps through shared memory.
// Bytes     parts once: count * dim * 4, L2 hits mostly.
#include "prelude.cuh"

#define COLUMNS 8
#define ROWS 64

struct NormSumPartsParameters {
    const float* parts;  // (count, dim)
    W* gradient;  // (dim)
    i64 stride;
    int count, dim;
};

extern "C" __global__ void __launch_bounds__(COLUMNS * ROWS) norm_sum_parts(const NormSumPartsParameters p) {
    __shared__ float shared[COLUMNS * ROWS / 32][COLUMNS];
    const int row = threadIdx.x / COLUMNS, column = blockIdx.x * COLUMNS + threadIdx.x % COLUMNS;
    const bool inside = column < p.dim;
    const float* parts = p.parts + (inside ? column : 0);
    float sum = 0.0f;
#pragma unroll 8
    for (int part = row; part < p.count; part += ROWS) sum += parts[(i64)part * p.dim];
    sum += __shfl_xor_sync(ALL_LANES, sum, 8);
    sum += __shfl_xor_sync(ALL_LANES, sum, 16);
    if (threadIdx.x % 32 < COLUMNS) shared[threadIdx.x / 32][threadIdx.x % 32] = sum;
    __syncthreads();
    if (threadIdx.x < COLUMNS && inside) {
        sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < COLUMNS * ROWS / 32; ++warp) sum += shared[warp][threadIdx.x];
        p.gradient[column * p.stride] = from_float<W>(sum);
    }
}
