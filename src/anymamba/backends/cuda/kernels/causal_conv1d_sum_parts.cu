// The last step of the convolution's backward: adds the blocks' sums of dweight and dbias, in the order of the blocks.
//
// Threads   One for each (channel, tap or bias); neighbours read neighbouring floats.
// Bytes     parts once: count * dim * (WIDTH + 1) * 4; 1 to 5 percent of what the backward itself moves.
#include "prelude.cuh"

struct CausalConv1dSumPartsParameters {
    const float* parts;  // (count, dim, WIDTH + 1)
    W* dweight;
    BIAS* dbias;  // or 0
    i64 dweight_stride[2], dbias_stride;
    int count, dim;
};

extern "C" __global__ void __launch_bounds__(128) causal_conv1d_sum_parts(const CausalConv1dSumPartsParameters p) {
    const int i = blockIdx.x * 128 + threadIdx.x;
    if (i >= p.dim * (WIDTH + 1)) return;
    const i64 step = (i64)p.dim * (WIDTH + 1);
    float sum = 0.0f;
#pragma unroll 8
    for (int part = 0; part < p.count; ++part) sum += p.parts[part * step + i];
    const int d = i / (WIDTH + 1), k = i % (WIDTH + 1);
    if (k < WIDTH)
        p.dweight[d * p.dweight_stride[0] + k * p.dweight_stride[1]] = from_float<W>(sum);
    else if (p.dbias)
        p.dbias[d * p.dbias_stride] = from_float<BIAS>(sum);
}
