// Dropout, residual addition and layer norm or RMS norm, backward.
//
// Formula   xhat = (v - mean) * rstd; g = dy * w + dy1 * w1; dv = (g - xhat * mean(g * xhat) - mean(g)) * rstd + dsum, an RMS
//           norm without the last mean; dx = drop(dv) * rowscale, dx1 = drop(dv), dresidual = dv;
//           dw = sum over rows of dy * xhat, db of dy, and the same of dy1.
// Algorithm v, dy, dy1 are read once, in the forward's layout of registers; statistics come from the forward. Blocks walk
//           rows, read the next one before they work on the one at hand (norm.cuh), and keep their columns' sums in registers; norm_sum_parts adds them in a fixed order: no atomics, the same bits
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
    float share, scale;  // share: 1 / dim
};

// What a thread reads of a row, and where of the next one.
struct Reader {
    const SUM* v;
    const DOUT* dy;
    const float* rstd;
    Raw<SUM> v_raw[PACKS];
    Raw<DOUT> dy_raw[PACKS];
    float next_rstd;
#if HAS_W1
    const DOUT* dy1;
    Raw<DOUT> dy1_raw[PACKS];
#endif
#if HAS_DSUM
    const DSUM* dsum;
    Raw<DSUM> dsum_raw[PACKS];
#endif
#if !RMS
    const float* mean;
    float next_mean;
#endif

    __device__ __forceinline__ void read(int lane, int dim) {
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            const int at = pack_at(j, lane, dim);
            load_raw<SUM>(v_raw[j], v + at);
            load_raw<DOUT>(dy_raw[j], dy + at);
#if HAS_W1
            load_raw<DOUT>(dy1_raw[j], dy1 + at);
#endif
#if HAS_DSUM
            load_raw<DSUM>(dsum_raw[j], dsum + at);
#endif
        }
        next_rstd = *rstd;
#if !RMS
        next_mean = *mean;
#endif
    }

    __device__ __forceinline__ void advance(const LayerNormBackwardParameters& p, int step) {
        v += step * p.v_stride;
        dy += step * p.dout_stride;
        rstd += step;
#if HAS_W1
        dy1 += step * p.dout1_stride;
#endif
#if HAS_DSUM
        dsum += step * p.dsum_stride;
#endif
#if !RMS
        mean += step;
#endif
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_backward(const LayerNormBackwardParameters p) {
#if WARPS > 1
    __shared__ float shared[4 * WARPS];
#else
    float* shared = (float*)0;
#endif
    int turn = 0;
    const int lane = threadIdx.x % LANES, column = lane * V;
#if UNITS > 1
    const int walker = blockIdx.x * UNITS + threadIdx.x / LANES;
#else
    const int walker = blockIdx.x;
#endif
    const int step = p.walkers * UNITS;

    float dweight[PACKS][V], dbias[PACKS][V], dweight1[PACKS][V], dbias1[PACKS][V];
    Raw<W> weight[PACKS];
    read_vector<W>(weight, p.weight, p.dim, lane);
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
#pragma unroll
        for (int i = 0; i < V; ++i) dweight[j][i] = dbias[j][i] = dweight1[j][i] = dbias1[j][i] = 0.0f;
    }
    Reader reader;
    reader.v = p.v + walker * p.v_stride + column;
    reader.dy = p.dout + walker * p.dout_stride + column;
    reader.rstd = p.rstd + walker;
#if HAS_W1
    reader.dy1 = p.dout1 + walker * p.dout1_stride + column;
#endif
#if HAS_DSUM
    reader.dsum = p.dsum + walker * p.dsum_stride + column;
#endif
#if !RMS
    reader.mean = p.mean + walker;
#endif
    i64 written = (i64)walker * p.dim + column;  // where the row's gradients go
#if AHEAD
    if (walker < p.rows) reader.read(lane, p.dim);
#endif
    for (i64 row = walker; row < p.rows; row += step) {
#if !AHEAD
        reader.read(lane, p.dim);
#endif
        const float rstd = reader.next_rstd;
#if RMS
        const float mean = 0.0f;
#else
        const float mean = reader.next_mean;
#endif
        float v[PACKS][V], dy[PACKS][V];
#if HAS_W1
        float dy1[PACKS][V];
#endif
#if HAS_DSUM
        Raw<DSUM> dsum[PACKS];
#endif
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            floats_of<SUM>(v[j], reader.v_raw[j]);
            floats_of<DOUT>(dy[j], reader.dy_raw[j]);
#if HAS_W1
            floats_of<DOUT>(dy1[j], reader.dy1_raw[j]);
#endif
#if HAS_DSUM
            dsum[j] = reader.dsum_raw[j];
#endif
        }
        reader.advance(p, row + step < p.rows ? step : 0);  // past the end: this row again, not used
#if AHEAD
        reader.read(lane, p.dim);
#endif
        float sums[RMS ? 1 : 2] = {};
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            const bool there = inside(j, lane, p.dim);
            float w[V];
            floats_of<W>(w, weight[j]);
#if RECOMPUTE
            float y[V];
#if HAS_BIAS
            load_floats<B>(y, p.bias + column + pack_at(j, lane, p.dim));
#else
#pragma unroll
            for (int i = 0; i < V; ++i) y[i] = 0.0f;
#endif
#pragma unroll
            for (int i = 0; i < V; ++i) y[i] += (v[j][i] - mean) * rstd * w[i];
            if (there) store_floats<DOUT>(p.out + written + j * LANES * V, y);
#endif
#if HAS_W1
            float w1[V];
            load_floats<B>(w1, p.weight1 + column + pack_at(j, lane, p.dim));
#endif
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const float xhat = v[j][i] = (v[j][i] - mean) * rstd;
                if (!there) dy[j][i] = 0.0f;
                dweight[j][i] = __fmaf_rn(dy[j][i], xhat, dweight[j][i]);
                dbias[j][i] += dy[j][i];
                dy[j][i] *= w[i];
#if HAS_W1
                if (!there) dy1[j][i] = 0.0f;
                dweight1[j][i] = __fmaf_rn(dy1[j][i], xhat, dweight1[j][i]);
                dbias1[j][i] += dy1[j][i];
                dy[j][i] = __fmaf_rn(dy1[j][i], w1[i], dy[j][i]);
#endif
                sums[0] = __fmaf_rn(dy[j][i], xhat, sums[0]);
#if !RMS
                sums[1] += dy[j][i];
#endif
            }
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
            if (!inside(j, lane, p.dim)) continue;
            float dv[V];
#pragma unroll
            for (int i = 0; i < V; ++i) dv[i] = __fmaf_rn(dy[j][i], rstd, -__fmaf_rn(v[j][i], along, level));
#if HAS_DSUM
            float more[V];
            floats_of<DSUM>(more, dsum[j]);
#pragma unroll
            for (int i = 0; i < V; ++i) dv[i] += more[i];
#endif
            const i64 at = written + j * LANES * V;
            if (p.dresidual) store_floats<SUM>(p.dresidual + at, dv);
            if (p.dx1) {
                float dx1[V];
#pragma unroll
                for (int i = 0; i < V; ++i) dx1[i] = dv[i];
                if (p.keep1) drop(dx1, p.keep1 + row * p.keep1_stride + column + j * LANES * V, p.scale);
                store_floats<X>(p.dx1 + at, dx1);
            }
#if HAS_KEEP
            drop(dv, p.keep + row * p.keep_stride + column + j * LANES * V, p.scale);
#endif
#if HAS_ROWSCALE
            const float rowscale = p.rowscale[row];
#pragma unroll
            for (int i = 0; i < V; ++i) dv[i] *= rowscale;
#endif
            store_floats<X>(p.dx + at, dv);
        }
        written += (i64)step * p.dim;
    }
    float* parts = p.parts + (i64)walker * p.dim + column;
    const i64 size = (i64)step * p.dim;
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        if (!inside(j, lane, p.dim)) continue;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            float* to = parts + j * LANES * V + i;
            *to = dweight[j][i];
#if HAS_BIAS
            *(to += size) = dbias[j][i];
#endif
#if HAS_W1
            *(to += size) = dweight1[j][i];
#if HAS_BIAS1
            *(to += size) = dbias1[j][i];
#endif
#endif
        }
    }
}
