// The last step of a norm's backward: adds the walkers' sums of a weight's or a bias's gradient, in a fixed order.
//
// Threads   32 along columns, 16 along parts; those 16 sums are added through shared memory.
// Bytes     parts once: count * dim * 4, mostly L2 hits.
#include "prelude.cuh"

#define ROWS 16

struct NormSumPartsParameters {
    const float* parts;  // (count, dim)
    W* gradient;  // (dim)
    i64 stride;
    int count, dim;
};

extern "C" __global__ void __launch_bounds__(32 * ROWS) norm_sum_parts(const NormSumPartsParameters p) {
    __shared__ float shared[ROWS][32];
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (column < p.dim) {
#pragma unroll 4
        for (int part = row; part < p.count; part += ROWS) sum += p.parts[(i64)part * p.dim + column];
    }
    shared[row][lane] = sum;
    __syncthreads();
    if (row == 0 && column < p.dim) {
#pragma unroll
        for (int r = 1; r < ROWS; ++r) sum += shared[r][lane];
        p.gradient[column * p.stride] = from_float<W>(sum);
    }
}
