// Gated layer norm or RMS norm over groups of columns, forward.
//
// Formula   out = norm(x) * silu(z) if BEFORE_GATE, else norm(x * silu(z)); norm(v) = (v - mean) * rstd * w + b.
// Algorithm A group of a row is read once and kept in registers; the variance is the mean of (v - mean)^2, a second sum over
//           registers, not E[v^2] - mean^2, which cancels.
// Threads   LANES for a group of a row (norm.cuh); the group is blockIdx.y, and blockIdx.z beyond 65535 of them.
// Bytes     x, z and out once, 4 (8) bytes of statistics a group. Floor: those bytes at the speed of a copy.
#include "norm.cuh"

struct LayerNormGatedForwardParameters {
    const X* x;
    const W* weight;
    const BIAS* bias;
    const Z* z;
    X* out;
    float* mean;  // (groups * rows), or 0
    float* rstd;  // likewise; both or none
    i64 x_stride, z_stride, out_stride;  // between rows; columns are contiguous
    i64 rows;
    int groups, size;  // size: columns of a group
    float eps, share;  // share: 1 / size
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    layernorm_gated_forward(const LayerNormGatedForwardParameters p) {
#if WARPS > 1
    __shared__ float shared[2 * WARPS];
    const i64 row = blockIdx.x;
#else
    float* shared = (float*)0;
    const i64 row = (i64)blockIdx.x * UNITS + threadIdx.x / LANES;
    if (row >= p.rows) return;  // whole warps: there is no barrier
#endif
    int turn = 0;
    const int group = blockIdx.z * 65535 + blockIdx.y;
    if (group >= p.groups) return;
    const int lane = threadIdx.x % LANES, first = group * p.size, column = first + lane * V;
    const X* x = p.x + row * p.x_stride + column;
    Raw<X> x_raw[PACKS];
#if HAS_Z
    const Z* z = p.z + row * p.z_stride + column;
    Raw<Z> z_raw[PACKS];
#endif
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        load_raw<X>(x_raw[j], x + pack_at(j, lane, p.size));
#if HAS_Z
        load_raw<Z>(z_raw[j], z + pack_at(j, lane, p.size));
#endif
    }
    Raw<W> weight[PACKS];
    read_vector<W>(weight, p.weight + first, p.size, lane);
#if HAS_BIAS
    Raw<BIAS> bias[PACKS];
    read_vector<BIAS>(bias, p.bias + first, p.size, lane);
#endif
    float v[PACKS][V];
#if HAS_Z
    float gate[PACKS][V];
#endif
    float sum[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        floats_of<X>(v[j], x_raw[j]);
#if HAS_Z
        floats_of<Z>(gate[j], z_raw[j]);
#endif
#pragma unroll
        for (int i = 0; i < V; ++i) {
#if HAS_Z
            gate[j][i] = silu(gate[j][i]);
#if !BEFORE_GATE
            v[j][i] *= gate[j][i];
#endif
#endif
            if (!inside(j, lane, p.size)) v[j][i] = 0.0f;
            sum[0] += v[j][i];
        }
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
            v[j][i] = inside(j, lane, p.size) ? v[j][i] - mean : 0.0f;
            squares[0] = __fmaf_rn(v[j][i], v[j][i], squares[0]);
        }
    }
    sum_over_row<1>(squares, shared, turn);
    const float rstd = inverse_root(__fmaf_rn(squares[0], p.share, p.eps));
    if (lane == 0 && p.rstd) {
        p.rstd[group * p.rows + row] = rstd;
#if !RMS
        p.mean[group * p.rows + row] = mean;
#endif
    }
    X* out = p.out + row * p.out_stride + column;
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        float w[V], y[V];
        floats_of<W>(w, weight[j]);
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] = v[j][i] * rstd * w[i];
#if HAS_BIAS
        float b[V];
        floats_of<BIAS>(b, bias[j]);
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] += b[i];
#endif
#if HAS_Z && BEFORE_GATE
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] *= gate[j][i];
#endif
        if (inside(j, lane, p.size)) store_floats<X>(out + j * LANES * V, y);
    }
}
