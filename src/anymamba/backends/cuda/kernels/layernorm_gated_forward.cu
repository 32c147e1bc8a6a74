// Gated layer norm or RMS norm over groups of columns, forward.
//
// Formula   out = norm(x) * silu(z) if BEFORE_GATE, else norm(x * silu(z)); norm(v) = (v - mean) * rstd * w + b.
// Algorithm A group of a row is read once and kept in registers; the variance is the mean of (v - mean)^2, a second sum over
//           registers, not E[v^2] - mean^2, which cancels.
// Threads   LANES for a group of a row (norm.cuh). Weights are read again by every row, from the caches.
// Bytes     x, z and out once, 4 (8) bytes of statistics a group. Floor: those bytes at the speed of a copy.
#include "norm.cuh"

struct LayerNormGatedForwardParameters {
    const X* x;
    const W* weight;
    const BIAS* bias;
    const Z* z;
    X* out;
    float* mean;  // (groups * rows), or 0
    float* rstd;
    i64 x_stride, z_stride, out_stride;  // between rows; columns are contiguous
    i64 rows;
    int groups, size;  // columns of a group
    float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS) layernorm_gated_forward(const LayerNormGatedForwardParameters p) {
#if WARPS > 1
    __shared__ float shared[2 * WARPS];
#else
    float* shared = (float*)0;
#endif
    int turn = 0;
    const int lane = threadIdx.x % LANES;
    const i64 unit = (i64)blockIdx.x * UNITS + threadIdx.x / LANES;
    if (unit >= p.rows * p.groups) return;  // whole warps, and only where there is no barrier
    const i64 row = unit / p.groups;
    const int group = (int)(unit - row * p.groups);
    const int first = group * p.size;
    const X* x = p.x + row * p.x_stride + first;
    X* out = p.out + row * p.out_stride + first;

    float v[PACKS][V];
#if HAS_Z
    const Z* z = p.z + row * p.z_stride + first;
    float gate[PACKS][V];
#endif
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const int column = (j * LANES + lane) * V;
        const int safe = column < p.size ? column : 0;  // read before any is used; past the end: the first, not used
        load_floats<X>(v[j], x + safe);
#if HAS_Z
        load_floats<Z>(gate[j], z + safe);
#endif
    }
    float sum[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const bool inside = (j * LANES + lane) * V < p.size;
#pragma unroll
        for (int i = 0; i < V; ++i) {
#if HAS_Z
            gate[j][i] = silu(gate[j][i]);
#if !BEFORE_GATE
            v[j][i] *= gate[j][i];
#endif
#endif
            if (!inside) v[j][i] = 0.0f;
            sum[0] += v[j][i];
        }
    }
    float mean = 0.0f;
#if !RMS
    sum_over_row<1>(sum, shared, turn);
    mean = sum[0] / p.size;
#endif
    float squares[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const bool inside = (j * LANES + lane) * V < p.size;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            v[j][i] = inside ? v[j][i] - mean : 0.0f;
            squares[0] = __fmaf_rn(v[j][i], v[j][i], squares[0]);
        }
    }
    sum_over_row<1>(squares, shared, turn);
    const float rstd = 1.0f / sqrtf(squares[0] / p.size + p.eps);
    if (lane == 0) {
        p.rstd[group * p.rows + row] = rstd;
#if !RMS
        p.mean[group * p.rows + row] = mean;
#endif
    }
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const int column = (j * LANES + lane) * V;
        if (column >= p.size) continue;
        float w[V], y[V];
        load_floats<W>(w, p.weight + first + column);
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] = v[j][i] * rstd * w[i];
#if HAS_BIAS
        float b[V];
        load_floats<BIAS>(b, p.bias + first + column);
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] += b[i];
#endif
#if HAS_Z && BEFORE_GATE
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] *= gate[j][i];
#endif
        store_floats<X>(out + column, y);
    }
}
