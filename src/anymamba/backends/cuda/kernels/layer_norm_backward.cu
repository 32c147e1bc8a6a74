// Dropout, residual addition and layer norm or RMS norm, backward.
//
// Formula   xhat = (v - mean) * rstd; g = dy * w + dy1 * w1; dv = (g - xhat * mean(g * xhat) - mean(g)) * rstd + dsum, an RMS
//           norm without the last mean; dx = drop(dv) * rowscale, dx1 = drop(dv), dresidual = dv;
//           dw = sum over rows of dy * xhat, db of dy, and the same of dy1.
// Algorithm v, dy, dy1 are read once, in the forward's layout of registers; statistics come from the forward. Blocks walk rows
//           and keep their columns' sums in registers; norm_sum_parts adds them in a fixed order: no atomics, the same bits
//           every run. dx1 and dresidual are written only where they are not dx itself.
// Threads   As the forward.
// Bytes     v, dy, dy1, dsum and the gradients once; parts (walkers, dim) of 4 bytes a weight, written and read once.
#include "norm.cuh"

struct LayerNormBackwardParameters {
    const DOUT* dout;
    const SUM* v;
    const W* weight;
    const B* bias;  // for out
    const B* weight1;
    const DOUT* dout1;
    const DSUM* dsum;
    const float* rowscale;
    const unsigned char* keep;
    const unsigned char* keep1;  // or 0
    const float* mean;
    const float* rstd;
    X* dx;
    SUM* dresidual;  // or 0
    X* dx1;  // or 0
    DOUT* out;
    float* parts;  // (dw, db, dw1, db1: those there are, walkers * UNITS, dim)
    i64 dout_stride, v_stride, dout1_stride, dsum_stride, keep_stride, keep1_stride;
    i64 rows;
    int dim, walkers;
    float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS) layer_norm_backward(const LayerNormBackwardParameters p) {
#if WARPS > 1
    __shared__ float shared[4 * WARPS];
#else
    float* shared = (float*)0;
#endif
    int turn = 0;
    const int lane = threadIdx.x % LANES;
    const int walker = blockIdx.x * UNITS + threadIdx.x / LANES;
    const float share = 1.0f / p.dim;

    float dweight[PACKS][V], dbias[PACKS][V], dweight1[PACKS][V], dbias1[PACKS][V];
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
#pragma unroll
        for (int i = 0; i < V; ++i) dweight[j][i] = dbias[j][i] = dweight1[j][i] = dbias1[j][i] = 0.0f;
    }
    for (i64 row = walker; row < p.rows; row += p.walkers * UNITS) {
        const float rstd = p.rstd[row];
#if RMS
        const float mean = 0.0f;
#else
        const float mean = p.mean[row];
#endif
        float v[PACKS][V], dy[PACKS][V];
#if HAS_W1
        float dy1[PACKS][V];
#endif
#if HAS_DSUM
        float dsum[PACKS][V];
#endif
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            const int column = (j * LANES + lane) * V;
            const int safe = column < p.dim ? column : 0;
            load_floats<SUM>(v[j], p.v + row * p.v_stride + safe);
            load_floats<DOUT>(dy[j], p.dout + row * p.dout_stride + safe);
#if HAS_W1
            load_floats<DOUT>(dy1[j], p.dout1 + row * p.dout1_stride + safe);
#endif
#if HAS_DSUM
            load_floats<DSUM>(dsum[j], p.dsum + row * p.dsum_stride + safe);
#endif
        }
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            const int column = (j * LANES + lane) * V;
            const bool inside = column < p.dim;
            const int safe = inside ? column : 0;
            float w[V];
            load_floats<W>(w, p.weight + safe);
#if RECOMPUTE
            float y[V];
#if HAS_BIAS
            load_floats<B>(y, p.bias + safe);
#else
#pragma unroll
            for (int i = 0; i < V; ++i) y[i] = 0.0f;
#endif
#pragma unroll
            for (int i = 0; i < V; ++i) y[i] += (v[j][i] - mean) * rstd * w[i];
            if (inside) store_floats<DOUT>(p.out + row * p.dim + column, y);
#endif
#if HAS_W1
            float w1[V];
            load_floats<B>(w1, p.weight1 + safe);
#endif
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const float xhat = v[j][i] = (v[j][i] - mean) * rstd;
                if (!inside) dy[j][i] = 0.0f;
                dweight[j][i] = __fmaf_rn(dy[j][i], xhat, dweight[j][i]);
                dbias[j][i] += dy[j][i];
                dy[j][i] *= w[i];
#if HAS_W1
                if (!inside) dy1[j][i] = 0.0f;
                dweight1[j][i] = __fmaf_rn(dy1[j][i], xhat, dweight1[j][i]);
                dbias1[j][i] += dy1[j][i];
                dy[j][i] = __fmaf_rn(dy1[j][i], w1[i], dy[j][i]);
#endif
                sums[0] = __fmaf_rn(dy[j][i], xhat, sums[0]);
                sums[1] += dy[j][i];
            }
        }
        sum_over_row<2>(sums, shared, turn);
        const float along = sums[0] * share;
#if RMS
        const float level = 0.0f;
#else
        const float level = sums[1] * share;
#endif
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            const int column = (j * LANES + lane) * V;
            if (column >= p.dim) continue;
            float dv[V];
#pragma unroll
            for (int i = 0; i < V; ++i) {
                dv[i] = (dy[j][i] - v[j][i] * along - level) * rstd;
#if HAS_DSUM
                dv[i] += dsum[j][i];
#endif
            }
            const i64 at = row * p.dim + column;
            if (p.dresidual) store_floats<SUM>(p.dresidual + at, dv);
            if (p.dx1) {
                float dx1[V];
#pragma unroll
                for (int i = 0; i < V; ++i) dx1[i] = dv[i];
                if (p.keep1) drop(dx1, p.keep1 + row * p.keep1_stride + column, p.scale);
                store_floats<X>(p.dx1 + at, dx1);
            }
#if HAS_KEEP
            drop(dv, p.keep + row * p.keep_stride + column, p.scale);
#endif
#if HAS_ROWSCALE
#pragma unroll
            for (int i = 0; i < V; ++i) dv[i] *= p.rowscale[row];
#endif
            store_floats<X>(p.dx + at, dv);
        }
    }
    float* parts = p.parts + (i64)walker * p.dim;
    const i64 step = (i64)p.walkers * UNITS * p.dim;
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const int column = (j * LANES + lane) * V;
        if (column >= p.dim) continue;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            float* to = parts + column + i;
            *to = dweight[j][i];
#if HAS_BIAS
            *(to += step) = dbias[j][i];
#endif
#if HAS_W1
            *(to += step) = dweight1[j][i];
#if HAS_BIAS1
            *(to += step) = dbias1[j][i];
#endif
#endif
        }
    }
}
