// Gated layer norm or RMS norm over groups of columns, backward.
//
// Formula   xhat = (v - mean) * rstd; g = dy * w; dv = (g - xhat * mean(g * xhat) - mean(g)) * rstd, an RMS norm without the
//           last mean; dw = sum over rows of dy * xhat, db of dy. BEFORE_GATE: v = x, dy = dout * silu(z),
//           dz = dout * (xhat * w + b) * silu'(z). Else v = x * silu(z), dy = dout, dx = dv * silu(z), dz = dv * x * silu'(z).
// Algorithm x, z and dout are read once, in the forward's layout of registers; statistics come from the forward. Blocks walk
//           rows, read the next one before they work on the one at hand (norm.cuh), and keep their columns' dw and db in registers; norm_sum_parts adds them in a fixed order: no atomics, the
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
    float share;  // 1 / size
};

// What a thread reads of a row, and where of the next one.
struct Reader {
    const X* x;
    const DOUT* dout;
    const float* rstd;
    Raw<X> x_raw[PACKS];
    Raw<DOUT> dout_raw[PACKS];
    float next_rstd;
#if HAS_Z
    const Z* z;
    Raw<Z> z_raw[PACKS];
#endif
#if !RMS
    const float* mean;
    float next_mean;
#endif

    __device__ __forceinline__ void read(int lane, int size) {
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            const int at = pack_at(j, lane, size);
            load_raw<X>(x_raw[j], x + at);
            load_raw<DOUT>(dout_raw[j], dout + at);
#if HAS_Z
            load_raw<Z>(z_raw[j], z + at);
#endif
        }
        next_rstd = *rstd;
#if !RMS
        next_mean = *mean;
#endif
    }

    __device__ __forceinline__ void advance(const LayerNormGatedBackwardParameters& p, int step) {
        x += step * p.x_stride;
        dout += step * p.dout_stride;
        rstd += step;
#if HAS_Z
        z += step * p.z_stride;
#endif
#if !RMS
        mean += step;
#endif
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    layernorm_gated_backward(const LayerNormGatedBackwardParameters p) {
#if WARPS > 1
    __shared__ float shared[4 * WARPS];
#else
    float* shared = (float*)0;
#endif
    int turn = 0;
    const int lane = threadIdx.x % LANES;
    const int group = blockIdx.x % p.groups;
#if UNITS > 1
    const int walker = blockIdx.x / p.groups * UNITS + threadIdx.x / LANES;
#else
    const int walker = blockIdx.x / p.groups;
#endif
    const int step = p.walkers * UNITS;
    const int first = group * p.size, column = first + lane * V;

    float dweight[PACKS][V], dbias[PACKS][V];
    Raw<W> weight[PACKS];
    read_vector<W>(weight, p.weight + first, p.size, lane);
#if HAS_BIAS
    Raw<BIAS> bias[PACKS];
    read_vector<BIAS>(bias, p.bias + first, p.size, lane);
#endif
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
#pragma unroll
        for (int i = 0; i < V; ++i) dweight[j][i] = dbias[j][i] = 0.0f;
    }
    Reader reader;
    reader.x = p.x + walker * p.x_stride + column;
    reader.dout = p.dout + walker * p.dout_stride + column;
    reader.rstd = p.rstd + group * p.rows + walker;
    X* dx = p.dx + walker * p.dx_stride + column;
#if HAS_Z
    reader.z = p.z + walker * p.z_stride + column;
    Z* dz_at = p.dz + walker * p.dz_stride + column;
#endif
#if !RMS
    reader.mean = p.mean + group * p.rows + walker;
#endif
#if RECOMPUTE
    X* out = p.out + walker * p.out_stride + column;
#endif
#if AHEAD
    if (walker < p.rows) reader.read(lane, p.size);
#endif
    for (i64 row = walker; row < p.rows; row += step) {
#if !AHEAD
        reader.read(lane, p.size);
#endif
        const float rstd = reader.next_rstd;
#if RMS
        const float mean = 0.0f;
#else
        const float mean = reader.next_mean;
#endif
        float v[PACKS][V], dy[PACKS][V];
#if HAS_Z
        float open[PACKS][V], slope[PACKS][V];  // silu(z) and its derivative
#endif
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            floats_of<X>(v[j], reader.x_raw[j]);
            floats_of<DOUT>(dy[j], reader.dout_raw[j]);
#if HAS_Z
            floats_of<Z>(open[j], reader.z_raw[j]);
#endif
        }
        reader.advance(p, row + step < p.rows ? step : 0);  // past the end: this row again, not used
#if AHEAD
        reader.read(lane, p.size);
#endif
        float sums[RMS ? 1 : 2] = {};
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            float w[V], b[V], dz[V], y[V];
            floats_of<W>(w, weight[j]);
#if HAS_BIAS
            floats_of<BIAS>(b, bias[j]);
#endif
#pragma unroll
            for (int i = 0; i < V; ++i) {
#if HAS_Z
                const float s = sigmoid(open[j][i]);
                open[j][i] *= s;
                slope[j][i] = __fmaf_rn(open[j][i], 1.0f - s, s);
#endif
#if HAS_Z && !BEFORE_GATE
                const float xhat = (v[j][i] * open[j][i] - mean) * rstd;
                slope[j][i] *= v[j][i];  // all that dz needs of x and z
#else
                const float xhat = (v[j][i] - mean) * rstd;
#endif
                v[j][i] = xhat;
                y[i] = xhat * w[i];
#if HAS_BIAS
                y[i] += b[i];
#endif
#if HAS_Z && BEFORE_GATE
                dz[i] = dy[j][i] * y[i] * slope[j][i];
                dy[j][i] *= open[j][i];
                y[i] *= open[j][i];
#endif
                if (!inside(j, lane, p.size)) dy[j][i] = 0.0f;
                dweight[j][i] = __fmaf_rn(dy[j][i], xhat, dweight[j][i]);
                dbias[j][i] += dy[j][i];
                dy[j][i] *= w[i];
                sums[0] = __fmaf_rn(dy[j][i], xhat, sums[0]);
#if !RMS
                sums[1] += dy[j][i];
#endif
            }
#if HAS_Z && BEFORE_GATE
            if (inside(j, lane, p.size)) store_floats<Z>(dz_at + j * LANES * V, dz);
#endif
#if RECOMPUTE
            if (inside(j, lane, p.size)) store_floats<X>(out + j * LANES * V, y);
#endif
        }
        sum_over_row<RMS ? 1 : 2>(sums, shared, turn);
        const float along = sums[0] * p.share * rstd;
#if RMS
        const float level = 0.0f;
#else
        const float level = sums[1] * p.share * rstd;
#endif
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            if (!inside(j, lane, p.size)) continue;
            float grad[V];
#pragma unroll
            for (int i = 0; i < V; ++i) grad[i] = __fmaf_rn(dy[j][i], rstd, -__fmaf_rn(v[j][i], along, level));
#if HAS_Z && !BEFORE_GATE
            float dz[V];
#pragma unroll
            for (int i = 0; i < V; ++i) {
                dz[i] = grad[i] * slope[j][i];
                grad[i] *= open[j][i];
            }
            store_floats<Z>(dz_at + j * LANES * V, dz);
#endif
            store_floats<X>(dx + j * LANES * V, grad);
        }
        dx += step * p.dx_stride;
#if HAS_Z
        dz_at += step * p.dz_stride;
#endif
#if RECOMPUTE
        out += step * p.out_stride;
#endif
    }
    const i64 dim = (i64)p.groups * p.size;
    float* parts = p.parts + walker * dim + column;
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        if (!inside(j, lane, p.size)) continue;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            parts[j * LANES * V + i] = dweight[j][i];
#if HAS_BIAS
            parts[step * dim + j * LANES * V + i] = dbias[j][i];
#endif
        }
    }
}
