// Gated layer norm or RMS norm over groups of columns, backward.
//
// Formula   xhat = (v - mean) * rstd; g = dy * w; dv = (g - xhat * mean(g * xhat) - mean(g)) * rstd, an RMS norm without the
//           last mean; dw = sum over rows of dy * xhat, db of dy. BEFORE_GATE: v = x, dy = dout * silu(z),
//           dz = dout * (xhat * w + b) * silu'(z). Else v = x * silu(z), dy = dout, dx = dv * silu(z), dz = dv * x * silu'(z).
// Algorithm x, z and dout are read once, in the forward's layout of registers; statistics come from the forward. Blocks walk
//           rows and keep their columns' dw and db in registers; norm_sum_parts adds them in a fixed order: no atomics, the
//           same bits every run.
// Threads   As the forward. A block has one group of columns; blockIdx.x = walker * groups + group.
// Bytes     x, z, dout, dx, dz once; parts (walkers, dim) of 4 or 8 bytes, written and read once.
#include "norm.cuh"

struct LayerNormGatedBackwardParameters {
    const DOUT* dout;
    const X* x;
    const W* weight;
    const BIAS* bias;
    const Z* z;
    const float* mean;
    const float* rstd;
    X* dx;
    Z* dz;
    X* out;  // where it is wanted again (RECOMPUTE)
    float* parts;  // (1 or 2 with a bias, walkers * UNITS, dim)
    i64 dout_stride, x_stride, z_stride, dx_stride, dz_stride, out_stride;
    i64 rows;
    int groups, size, walkers;
};

extern "C" __global__ void __launch_bounds__(THREADS) layernorm_gated_backward(const LayerNormGatedBackwardParameters p) {
#if WARPS > 1
    __shared__ float shared[4 * WARPS];
#else
    float* shared = (float*)0;
#endif
    int turn = 0;
    const int lane = threadIdx.x % LANES;
    const int group = blockIdx.x % p.groups;
    const int walker = blockIdx.x / p.groups * UNITS + threadIdx.x / LANES;
    const int first = group * p.size;
    const float share = 1.0f / p.size;

    float dweight[PACKS][V], dbias[PACKS][V];
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
#pragma unroll
        for (int i = 0; i < V; ++i) dweight[j][i] = dbias[j][i] = 0.0f;
    }
    for (i64 row = walker; row < p.rows; row += p.walkers * UNITS) {
        const X* x = p.x + row * p.x_stride + first;
        const DOUT* dout = p.dout + row * p.dout_stride + first;
        const float rstd = p.rstd[group * p.rows + row];
#if RMS
        const float mean = 0.0f;
#else
        const float mean = p.mean[group * p.rows + row];
#endif
        float v[PACKS][V], dy[PACKS][V];
#if HAS_Z
        const Z* z = p.z + row * p.z_stride + first;
        float gate[PACKS][V];
#endif
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            const int column = (j * LANES + lane) * V;
            const int safe = column < p.size ? column : 0;
            load_floats<X>(v[j], x + safe);
            load_floats<DOUT>(dy[j], dout + safe);
#if HAS_Z
            load_floats<Z>(gate[j], z + safe);
#endif
        }
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            const int column = (j * LANES + lane) * V;
            const bool inside = column < p.size;
            const int safe = inside ? column : 0;
            float w[V], b[V], dz[V], y[V];
            load_floats<W>(w, p.weight + first + safe);
#if HAS_BIAS
            load_floats<BIAS>(b, p.bias + first + safe);
#endif
#pragma unroll
            for (int i = 0; i < V; ++i) {
#if HAS_Z && !BEFORE_GATE
                const float xhat = (v[j][i] * silu(gate[j][i]) - mean) * rstd;
#else
                const float xhat = (v[j][i] - mean) * rstd;
#endif
                y[i] = xhat * w[i];
#if HAS_BIAS
                y[i] += b[i];
#endif
#if HAS_Z && BEFORE_GATE
                const float s = sigmoid(gate[j][i]), open = gate[j][i] * s;
                dz[i] = dy[j][i] * y[i] * (s + open * (1.0f - s));
                dy[j][i] *= open;
                y[i] *= open;
#endif
                if (!inside) dy[j][i] = 0.0f;
                dweight[j][i] = __fmaf_rn(dy[j][i], xhat, dweight[j][i]);
                dbias[j][i] += dy[j][i];
                dy[j][i] *= w[i];
                sums[0] = __fmaf_rn(dy[j][i], xhat, sums[0]);
                sums[1] += dy[j][i];
#if !(HAS_Z && !BEFORE_GATE)
                v[j][i] = xhat;  // else x itself is needed for dz
#endif
            }
#if HAS_Z && BEFORE_GATE
            if (inside) store_floats<Z>(p.dz + row * p.dz_stride + first + column, dz);
#endif
#if RECOMPUTE
            if (inside) store_floats<X>(p.out + row * p.out_stride + first + column, y);
#endif
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
            if (column >= p.size) continue;
            float dx[V];
#if HAS_Z && !BEFORE_GATE
            float dz[V];
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const float s = sigmoid(gate[j][i]), open = gate[j][i] * s;
                const float xhat = (v[j][i] * open - mean) * rstd;
                const float dv = (dy[j][i] - xhat * along - level) * rstd;
                dx[i] = dv * open;
                dz[i] = dv * v[j][i] * (s + open * (1.0f - s));
            }
            store_floats<Z>(p.dz + row * p.dz_stride + first + column, dz);
#else
#pragma unroll
            for (int i = 0; i < V; ++i) dx[i] = (dy[j][i] - v[j][i] * along - level) * rstd;
#endif
            store_floats<X>(p.dx + row * p.dx_stride + first + column, dx);
        }
    }
    const i64 dim = (i64)p.groups * p.size;
    float* parts = p.parts + walker * dim + first;
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const int column = (j * LANES + lane) * V;
        if (column >= p.size) continue;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            parts[column + i] = dweight[j][i];
#if HAS_BIAS
            parts[(i64)p.walkers * UNITS * dim + column + i] = dbias[j][i];
#endif
        }
    }
}
