// Causal depthwise convolution, backward, for tensors whose channels are contiguous ("channel last": (B, L, D) in memory).
//
// Formula   As causal_conv1d_backward.cu.
// Threads   A thread has CHANNELS neighbouring channels and walks a run of columns s: it reads x[s] and dout[s], has the
//           columns before in registers, so gets dy[s]; with dy[s - 3 .. s] in registers it writes dx[s - 3]. A run
//           begins WIDTH - 1 columns early for x and ends WIDTH - 1 late for dy. 32 threads along channels, 8 along
//           time; these 8 add their dweight and dbias through shared memory in order. CHANNELS = 1 takes any strides.
// Order     The blocks' sums are added by `causal_conv1d_sum_parts` in a fixed order: bit-equal in every run.
// Bytes     x, dout, dx once, WIDTH - 1 columns of x twice and of dout once more per run (9 / run of one tensor, L2
//           hits).
//           Measured (H200, share of the floor): bf16 0.53 to 0.69, fp32 0.72 to 0.89: bf16 is bound by issue, not by
//           memory.
// Lost      UNROLL 8: 156 registers, one block a multiprocessor, 0.47. Tests for the edges in every group: 0.53. Pre-
//           scaled weights as in the other kernel: 16 registers more, spilled. Next: 8 channels a thread with packed
//           bf16x2 arithmetic for x.
#include "causal_conv1d.cuh"

#define LANES 32
#define RUNS 8
#define UNROLL 4
#define BLOCKS (HAS_SEQ || HAS_STATES ? 1 : 2)  // a multiprocessor should hold; with all options that would spill

struct CausalConv1dBackwardChannelLastParameters {
    const X* x;
    const W* weight;
    const BIAS* bias;  // or 0
    const X* dout;
    const SEQ* seq_idx;
    const X* initial_states;  // or 0
    const X* dfinal_states;  // or 0
    X* dx;
    W* dweight;  // used if gridDim.x == 1
    BIAS* dbias;  // or 0
    float* parts;  // (gridDim.x, dim, WIDTH + 1) else: the blocks' sums of dweight and dbias
    X* dinitial_states;  // or 0
    i64 x_stride[3], dout_stride[3], dx_stride[3];
    i64 weight_stride[2], bias_stride, seq_stride[2], initial_stride[3], dfinal_stride[3];
    i64 dweight_stride[2], dbias_stride, dinitial_stride[3];
    int batch, dim, seqlen;
    int run;  // columns of a thread: a multiple of UNROLL
    int tiles_along_time;  // of RUNS * run columns
};

typedef Pack<X, CHANNELS> Column;
struct Yes {
    static constexpr bool value = true;
};
struct No {
    static constexpr bool value = false;
};

extern "C" __global__ void __launch_bounds__(LANES* RUNS, BLOCKS)
    causal_conv1d_backward_channel_last(const CausalConv1dBackwardChannelLastParameters p) {
    const int lane = threadIdx.x % LANES, run_in_block = threadIdx.x / LANES;
    const int d = (blockIdx.y * LANES + lane) * CHANNELS;
    const int b = blockIdx.x / p.tiles_along_time;
    const int begin = (blockIdx.x % p.tiles_along_time * RUNS + run_in_block) * p.run;
    const int end = min(begin + p.run, p.seqlen);

    float sums[WIDTH + 1][CHANNELS];
#pragma unroll
    for (int k = 0; k <= WIDTH; ++k)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) sums[k][c] = 0.0f;

    if (d < p.dim && begin < end) {
        const X* x = p.x + b * p.x_stride[0] + d * p.x_stride[1];
        const X* dout = p.dout + b * p.dout_stride[0] + d * p.dout_stride[1];
        const X* initial =
            HAS_STATES && p.initial_states ? p.initial_states + b * p.initial_stride[0] + d * p.initial_stride[1] : (const X*)0;
#if HAS_SEQ
        const SEQ* seq = p.seq_idx + b * p.seq_stride[0];
        SEQ owner[BEFORE + UNROLL];
        const SEQ last_owner = HAS_STATES ? seq[(p.seqlen - 1) * p.seq_stride[1]] : SEQ(0);
#endif
        float w[WIDTH][CHANNELS], bias[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            bias[c] = p.bias ? to_float(p.bias[(d + c) * p.bias_stride]) : 0.0f;
#pragma unroll
            for (int k = 0; k < WIDTH; ++k)
                w[k][c] = to_float(p.weight[(d + c) * p.weight_stride[0] + k * p.weight_stride[1]]);
        }
        // Windows: column[j] and dy[j] are those of s - BEFORE + j.
        float column[BEFORE + UNROLL][CHANNELS], dy[BEFORE + UNROLL][CHANNELS];
#pragma unroll
        for (int j = 0; j < BEFORE; ++j) {
            const int t = begin - BEFORE + j;
            to_floats(column[j], load_pack<X, CHANNELS>(x + max(t, 0) * p.x_stride[2]));
            if (t < 0) {
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    column[j][c] =
                        initial ? to_float(initial[c * p.initial_stride[1] + (t + BEFORE) * p.initial_stride[2]]) : 0.0f;
            }
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) dy[j][c] = 0.0f;
#if HAS_SEQ
            owner[j] = seq[(t < 0 ? 0 : t) * p.seq_stride[1]];
#endif
        }
        // The first run also makes dinitial_states: dx of the columns before the first.
        const int first_written = HAS_STATES && begin == 0 && p.dinitial_states ? -BEFORE : begin;
        const X *next_x = x + begin * p.x_stride[2], *next_dout = dout + begin * p.dout_stride[2];
        X* next_dx = p.dx + b * p.dx_stride[0] + d * p.dx_stride[1] + (i64)(begin - BEFORE) * p.dx_stride[2];
        // FULL: all UNROLL columns are the run's own; else some are the next run's, or past the end (the last column again).
        auto group = [&](auto full, int s0) {
            constexpr bool FULL = decltype(full)::value;
            Column of_x[UNROLL], of_dout[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                of_x[u] = load_pack<X, CHANNELS>(next_x);
                of_dout[u] = load_pack<X, CHANNELS>(next_dout);
                if (FULL ? u + 1 < UNROLL || s0 + UNROLL < p.seqlen : s0 + u + 1 < p.seqlen) {
                    next_x += p.x_stride[2];
                    next_dout += p.dout_stride[2];
                }
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int s = s0 + u, t = s - BEFORE;
#if HAS_SEQ
                owner[BEFORE + u] = s < p.seqlen ? seq[s * p.seq_stride[1]] : SEQ(-1);
#endif
                float all[CHANNELS], gradients[CHANNELS];
                to_floats(column[BEFORE + u], of_x[u]);
                to_floats(gradients, of_dout[u]);
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) {
                    float gradient = gradients[c];
#if SILU
                    float y = bias[c];
#pragma unroll
                    for (int k = 0; k < WIDTH; ++k) {
#if HAS_SEQ
                        y += owner[u + k] == owner[u + BEFORE] ? w[k][c] * column[u + k][c] : 0.0f;
#else
                        y = __fmaf_rn(w[k][c], column[u + k][c], y);
#endif
                    }
                    gradient *= silu_derivative(y);
#endif
#if HAS_SEQ
                    if (owner[u + BEFORE] < 0) gradient = 0.0f;
#endif
                    if (!FULL && s >= p.seqlen) gradient = 0.0f;
                    dy[BEFORE + u][c] = gradient;
                    if (FULL || s < end) {
                        sums[WIDTH][c] += gradient;
#pragma unroll
                        for (int k = 0; k < WIDTH; ++k) {
#if HAS_SEQ
                            if (owner[u + k] != owner[u + BEFORE]) continue;
#endif
                            sums[k][c] = __fmaf_rn(gradient, column[u + k][c], sums[k][c]);
                        }
                    }
                    float sum = 0.0f;  // dx[t]: tap k reached output t + BEFORE - k, which is number u + BEFORE - k here
#pragma unroll
                    for (int k = 0; k < WIDTH; ++k) {
#if HAS_SEQ
                        if (owner[u] != owner[u + BEFORE - k]) continue;
#endif
                        sum = __fmaf_rn(w[k][c], dy[u + BEFORE - k][c], sum);
                    }
                    if (HAS_STATES && !FULL && p.dfinal_states && t >= p.seqlen - BEFORE && t < p.seqlen) {
                        float add = to_float(
                            p.dfinal_states[b * p.dfinal_stride[0] + (d + c) * p.dfinal_stride[1] +
                                            (t - p.seqlen + BEFORE) * p.dfinal_stride[2]]
                        );
#if HAS_SEQ
                        if (owner[u] != last_owner) add = 0.0f;
#endif
                        sum += add;
                    }
                    all[c] = sum;
                }
                Column result;
                from_floats(result, all);
                if (t >= begin && (FULL || t < end)) store_pack<X, CHANNELS>(next_dx, result);
                next_dx += p.dx_stride[2];
                if (HAS_STATES && s0 == begin && t < 0 && t >= first_written) {
#pragma unroll
                    for (int c = 0; c < CHANNELS; ++c)
                        p.dinitial_states[b * p.dinitial_stride[0] + (d + c) * p.dinitial_stride[1] +
                                          (t + BEFORE) * p.dinitial_stride[2]] = result.at[c];
                }
            }
#pragma unroll
            for (int j = 0; j < BEFORE; ++j) {
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) {
                    column[j][c] = column[UNROLL + j][c];
                    dy[j][c] = dy[UNROLL + j][c];
                }
#if HAS_SEQ
                owner[j] = owner[UNROLL + j];
#endif
            }
        };
        int s0 = begin;
#pragma unroll 1
        for (; s0 + UNROLL <= end; s0 += UNROLL) group(Yes(), s0);
#pragma unroll 1
        for (; s0 < end + BEFORE; s0 += UNROLL) group(No(), s0);
    }

    __shared__ float of_run[RUNS][WIDTH + 1][LANES * CHANNELS];
#pragma unroll
    for (int k = 0; k <= WIDTH; ++k)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) of_run[run_in_block][k][lane * CHANNELS + c] = sums[k][c];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < (WIDTH + 1) * LANES * CHANNELS; i += LANES * RUNS) {
        const int k = i / (LANES * CHANNELS), channel = blockIdx.y * LANES * CHANNELS + i % (LANES * CHANNELS);
        if (channel >= p.dim) continue;
        float sum = 0.0f;
#pragma unroll
        for (int run = 0; run < RUNS; ++run) sum += of_run[run][k][i % (LANES * CHANNELS)];
        if (gridDim.x > 1)
            p.parts[((i64)blockIdx.x * p.dim + channel) * (WIDTH + 1) + k] = sum;
        else if (k < WIDTH)
            p.dweight[channel * p.dweight_stride[0] + k * p.dweight_stride[1]] = from_float<W>(sum);
        else if (p.dbias)
            p.dbias[channel * p.dbias_stride] = from_float<BIAS>(sum);
    }
}
