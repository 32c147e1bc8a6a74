// Dropout, residual addition and layer norm or RMS norm, forward.
//
// Formula   v = drop(x * rowscale) + drop(x1) + residual; out = norm(v) * w + b, out1 = norm(v) * w1 + b1;
//           norm(v) = (v - mean) * rstd, an RMS norm without the mean. STORE: v is written too, rounded.
// Algorithm A row is read once and kept in registers; the variance is the mean of (v - mean)^2, a second sum over registers.
// Threads   LANES for a row (norm.cuh). Weights are read again by every row, from the caches.
// Bytes     x, x1, residual, out, out1, v once, masks a byte an element, statistics 4 (8) bytes a row. Floor: those bytes at
//           the speed of a copy.
#include "norm.cuh"

struct LayerNormForwardParameters {
    const X* x;
    const W* weight;
    const B* bias;
    const R* residual;
    const X1* x1;
    const B* weight1;
    const B* bias1;  // or 0
    const float* rowscale;
    const unsigned char* keep;
    const unsigned char* keep1;
    OUT* out;
    OUT* out1;
    SUM* sum;
    float* mean;
    float* rstd;
    i64 x_stride, residual_stride, x1_stride, keep_stride, keep1_stride, out_stride, out1_stride, sum_stride;
    i64 rows;
    int dim;
    float eps, scale;  // scale: 1 / (1 - dropout_p)
};

extern "C" __global__ void __launch_bounds__(THREADS) layer_norm_forward(const LayerNormForwardParameters p) {
#if WARPS > 1
    __shared__ float shared[2 * WARPS];
#else
    float* shared = (float*)0;
#endif
    int turn = 0;
    const int lane = threadIdx.x % LANES;
    const i64 row = (i64)blockIdx.x * UNITS + threadIdx.x / LANES;
    if (row >= p.rows) return;  // whole warps, and only where there is no barrier

    float v[PACKS][V];
#if HAS_X1
    float other[PACKS][V];
#endif
#if HAS_RESIDUAL
    float residual[PACKS][V];
#endif
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const int column = (j * LANES + lane) * V;
        const int safe = column < p.dim ? column : 0;  // read before any is used; past the end: the first, not used
        load_floats<X>(v[j], p.x + row * p.x_stride + safe);
#if HAS_X1
        load_floats<X1>(other[j], p.x1 + row * p.x1_stride + safe);
#endif
#if HAS_RESIDUAL
        load_floats<R>(residual[j], p.residual + row * p.residual_stride + safe);
#endif
    }
#if HAS_ROWSCALE
    const float rowscale = p.rowscale[row];
#endif
    float sum[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const int column = (j * LANES + lane) * V;
        const bool inside = column < p.dim;
#if HAS_ROWSCALE
#pragma unroll
        for (int i = 0; i < V; ++i) v[j][i] *= rowscale;
#endif
#if HAS_KEEP
        drop(v[j], p.keep + row * p.keep_stride + (inside ? column : 0), p.scale);
#if HAS_X1
        drop(other[j], p.keep1 + row * p.keep1_stride + (inside ? column : 0), p.scale);
#endif
#endif
#pragma unroll
        for (int i = 0; i < V; ++i) {
#if HAS_X1
            v[j][i] += other[j][i];
#endif
#if HAS_RESIDUAL
            v[j][i] += residual[j][i];
#endif
            if (!inside) v[j][i] = 0.0f;
            sum[0] += v[j][i];
        }
#if STORE
        if (inside) store_floats<SUM>(p.sum + row * p.sum_stride + column, v[j]);
#endif
    }
    float mean = 0.0f;
#if !RMS
    sum_over_row<1>(sum, shared, turn);
    mean = sum[0] / p.dim;
#endif
    float squares[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const bool inside = (j * LANES + lane) * V < p.dim;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            v[j][i] = inside ? v[j][i] - mean : 0.0f;
            squares[0] = __fmaf_rn(v[j][i], v[j][i], squares[0]);
        }
    }
    sum_over_row<1>(squares, shared, turn);
    const float rstd = 1.0f / sqrtf(squares[0] / p.dim + p.eps);
    if (lane == 0) {
        p.rstd[row] = rstd;
#if !RMS
        p.mean[row] = mean;
#endif
    }
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const int column = (j * LANES + lane) * V;
        if (column >= p.dim) continue;
        float w[V], y[V];
        load_floats<W>(w, p.weight + column);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            v[j][i] *= rstd;
            y[i] = v[j][i] * w[i];
        }
#if HAS_BIAS
        float b[V];
        load_floats<B>(b, p.bias + column);
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] += b[i];
#endif
        store_floats<OUT>(p.out + row * p.out_stride + column, y);
#if HAS_W1
        float w1[V], y1[V];
        load_floats<B>(w1, p.weight1 + column);
#pragma unroll
        for (int i = 0; i < V; ++i) y1[i] = v[j][i] * w1[i];
        if (p.bias1) {
            float b1[V];
            load_floats<B>(b1, p.bias1 + column);
#pragma unroll
            for (int i = 0; i < V; ++i) y1[i] += b1[i];
        }
        store_floats<OUT>(p.out1 + row * p.out1_stride + column, y1);
#endif
    }
}
