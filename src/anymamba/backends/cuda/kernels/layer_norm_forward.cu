// Dropout, residual addition and layer norm or RMS norm, forward.
//
// Formula   v = drop(x * rowscale) + drop(x1) + residual; out = norm(v) * w + b, out1 = norm(v) * w1 + b1;
//           norm(v) = (v - mean) * rstd, an RMS norm without the mean. STORE: v is written too, rounded.
// Algorithm A row is read once and kept in registers; the variance is the mean of (v - mean)^2, a second sum over registers.
// Threads   LANES for a row (norm.cuh).
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
    float* mean;  // both or none
    float* rstd;
    i64 x_stride, residual_stride, x1_stride, keep_stride, keep1_stride, out_stride, out1_stride, sum_stride;
    i64 rows;
    int dim;
    float eps, share, scale;  // share: 1 / dim; scale: 1 / (1 - dropout_p)
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_forward(const LayerNormForwardParameters p) {
#if WARPS > 1
    __shared__ float shared[2 * WARPS];
    const i64 row = blockIdx.x;
#else
    float* shared = (float*)0;
    const i64 row = (i64)blockIdx.x * UNITS + threadIdx.x / LANES;
    if (row >= p.rows) return;  // whole warps: there is no barrier
#endif
    int turn = 0;
    const int lane = threadIdx.x % LANES, column = lane * V;
    const X* x = p.x + row * p.x_stride + column;
    Raw<X> x_raw[PACKS];
#if HAS_X1
    const X1* x1 = p.x1 + row * p.x1_stride + column;
    Raw<X1> x1_raw[PACKS];
#endif
#if HAS_RESIDUAL
    const R* residual = p.residual + row * p.residual_stride + column;
    Raw<R> residual_raw[PACKS];
#endif
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {  // all is read before any is used
        const int at = pack_at(j, lane, p.dim);
        load_raw<X>(x_raw[j], x + at);
#if HAS_X1
        load_raw<X1>(x1_raw[j], x1 + at);
#endif
#if HAS_RESIDUAL
        load_raw<R>(residual_raw[j], residual + at);
#endif
    }
    Raw<W> weight[PACKS];
    read_vector<W>(weight, p.weight, p.dim, lane);
#if HAS_BIAS
    Raw<B> bias[PACKS];
    read_vector<B>(bias, p.bias, p.dim, lane);
#endif
#if HAS_ROWSCALE
    const float rowscale = p.rowscale[row];
#endif
    float v[PACKS][V];
    float sum[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        floats_of<X>(v[j], x_raw[j]);
#if HAS_ROWSCALE
#pragma unroll
        for (int i = 0; i < V; ++i) v[j][i] *= rowscale;
#endif
#if HAS_KEEP
        drop(v[j], p.keep + row * p.keep_stride + column + pack_at(j, lane, p.dim), p.scale);
#endif
#if HAS_X1
        float other[V];
        floats_of<X1>(other, x1_raw[j]);
#if HAS_KEEP
        drop(other, p.keep1 + row * p.keep1_stride + column + pack_at(j, lane, p.dim), p.scale);
#endif
#pragma unroll
        for (int i = 0; i < V; ++i) v[j][i] += other[i];
#endif
#if HAS_RESIDUAL
        float added[V];
        floats_of<R>(added, residual_raw[j]);
#pragma unroll
        for (int i = 0; i < V; ++i) v[j][i] += added[i];
#endif
#pragma unroll
        for (int i = 0; i < V; ++i) {
            if (!inside(j, lane, p.dim)) v[j][i] = 0.0f;
            sum[0] += v[j][i];
        }
#if STORE
        if (inside(j, lane, p.dim)) store_floats<SUM>(p.sum + row * p.sum_stride + column + j * LANES * V, v[j]);
#endif
    }
    float mean = 0.0f;
#if !RMS
    sum_over_row<1>(sum, shared, turn);
    mean = sum[0] * p.share;
#endif
    float squares[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
            v[j][i] = inside(j, lane, p.dim) ? v[j][i] - mean : 0.0f;
            squares[0] = __fmaf_rn(v[j][i], v[j][i], squares[0]);
        }
    }
    sum_over_row<1>(squares, shared, turn);
    const float rstd = inverse_root(__fmaf_rn(squares[0], p.share, p.eps));
    if (lane == 0 && p.rstd) {
        p.rstd[row] = rstd;
#if !RMS
        p.mean[row] = mean;
#endif
    }
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        if (!inside(j, lane, p.dim)) continue;
        const int at = column + j * LANES * V;
        float w[V], y[V];
        floats_of<W>(w, weight[j]);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            v[j][i] *= rstd;
            y[i] = v[j][i] * w[i];
        }
#if HAS_BIAS
        float b[V];
        floats_of<B>(b, bias[j]);
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] += b[i];
#endif
        store_floats<OUT>(p.out + row * p.out_stride + at, y);
#if HAS_W1
        float w1[V], y1[V];
        load_floats<B>(w1, p.weight1 + at);
#pragma unroll
        for (int i = 0; i < V; ++i) y1[i] = v[j][i] * w1[i];
        if (p.bias1) {
            float b1[V];
            load_floats<B>(b1, p.bias1 + at);
#pragma unroll
            for (int i = 0; i < V; ++i) y1[i] += b1[i];
        }
        store_floats<OUT>(p.out1 + row * p.out1_stride + at, y1);
#endif
    }
}
