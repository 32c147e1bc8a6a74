// Causal depthwise convolution, forward, for tensors whose channels are contiguous ("channel last": (B, L, D) in memory).
//
// Formula   As causal_conv1d_forward.cu.
// Threads   A thread has CHANNELS neighbouring channels and a run of columns that it walks in time, the last WIDTH - 1
//           columns in registers; the next UNROLL columns are read before these are used (past the end: the last column
//           again, not used). 32 threads lie along channels (a warp reads 256 bytes of one column for 16-bit types), 8
//           along time. CHANNELS = 1 takes any strides.
// Bytes     x and out once, and WIDTH - 1 columns per run again (3 / run, mostly L2 hits). Floor as the other layout's.
//           Measured (H200, bf16, share of the floor): 0.73 at B32 L256, 0.83 at B8 L2048, 0.85 at B4 L8192.
// Lost      UNROLL 4: 0.75 at B4 L8192. Runs of 16 to 64 columns on long rows: 0.69 to 0.81, the start of a run costs a
//           latency.
#include "causal_conv1d.cuh"

#define LANES 32
#define RUNS 8
#define UNROLL 8

struct CausalConv1dForwardChannelLastParameters {
    const X* x;
    const W* weight;
    const BIAS* bias;  // or 0
    const SEQ* seq_idx;
    const X* initial_states;  // or 0
    X* out;
    X* final_states;  // (batch, dim, WIDTH - 1) contiguous, or 0
    i64 x_stride[3], out_stride[3];
    i64 weight_stride[2], bias_stride, seq_stride[2], initial_stride[3];
    int batch, dim, seqlen;
    int run;  // columns of a thread: a multiple of UNROLL
    int tiles_along_time;  // of RUNS * run columns
};

typedef Pack<X, CHANNELS> Column;

extern "C" __global__ void __launch_bounds__(LANES* RUNS)
    causal_conv1d_forward_channel_last(const CausalConv1dForwardChannelLastParameters p) {
    const int d = (blockIdx.y * LANES + threadIdx.x % LANES) * CHANNELS;
    if (d >= p.dim) return;
    const int b = blockIdx.x / p.tiles_along_time;
    const int begin = (blockIdx.x % p.tiles_along_time * RUNS + threadIdx.x / LANES) * p.run;
    if (begin >= p.seqlen) return;
    const int end = min(begin + p.run, p.seqlen);
    const X* x = p.x + b * p.x_stride[0] + d * p.x_stride[1];
    X* out = p.out + b * p.out_stride[0] + d * p.out_stride[1];
    const X* initial =
        HAS_STATES && p.initial_states ? p.initial_states + b * p.initial_stride[0] + d * p.initial_stride[1] : (const X*)0;
#if HAS_SEQ
    const SEQ* seq = p.seq_idx + b * p.seq_stride[0];
    SEQ owner[BEFORE + UNROLL];
#endif

    Column next[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
        next[u] = load_pack<X, CHANNELS>(x + min(begin + u, p.seqlen - 1) * p.x_stride[2]);
    float column[BEFORE + UNROLL][CHANNELS];
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
#if HAS_SEQ
        owner[j] = seq[(t < 0 ? 0 : t) * p.seq_stride[1]];
#endif
    }
    float w[WIDTH][CHANNELS], bias[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        bias[c] = p.bias ? to_float(p.bias[(d + c) * p.bias_stride]) : 0.0f;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) w[k][c] = to_float(p.weight[(d + c) * p.weight_stride[0] + k * p.weight_stride[1]]);
    }

    for (int t0 = begin; t0 < end; t0 += UNROLL) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            to_floats(column[BEFORE + u], next[u]);
#if HAS_SEQ
            owner[BEFORE + u] = t0 + u < end ? seq[(t0 + u) * p.seq_stride[1]] : SEQ(-1);
#endif
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            next[u] = load_pack<X, CHANNELS>(x + min(t0 + UNROLL + u, p.seqlen - 1) * p.x_stride[2]);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            float all[CHANNELS];
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                float y = bias[c];
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) {
#if HAS_SEQ
                    y += owner[u + k] == owner[u + BEFORE] ? w[k][c] * column[u + k][c] : 0.0f;
#else
                    y = __fmaf_rn(w[k][c], column[u + k][c], y);
#endif
                }
#if SILU
                y = silu(y);
#endif
#if HAS_SEQ
                if (owner[u + BEFORE] < 0) y = 0.0f;
#endif
                all[c] = y;
            }
            Column result;
            from_floats(result, all);
            if (t0 + u < end) store_pack<X, CHANNELS>(out + (t0 + u) * p.out_stride[2], result);
        }
#pragma unroll
        for (int j = 0; j < BEFORE; ++j) {
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) column[j][c] = column[UNROLL + j][c];
#if HAS_SEQ
            owner[j] = owner[UNROLL + j];
#endif
        }
    }

    if (HAS_STATES && p.final_states && end == p.seqlen) {
#pragma unroll
        for (int j = 0; j < BEFORE; ++j) {
            const int t = p.seqlen - BEFORE + j;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                X value = t >= 0    ? x[c * p.x_stride[1] + t * p.x_stride[2]]
                          : initial ? initial[c * p.initial_stride[1] + (t + BEFORE) * p.initial_stride[2]]
                                    : X{};
#if HAS_SEQ
                if (seq[(t < 0 ? 0 : t) * p.seq_stride[1]] != seq[(p.seqlen - 1) * p.seq_stride[1]]) value = X{};
#endif
                p.final_states[((i64)b * p.dim + d + c) * BEFORE + j] = value;
            }
        }
    }
}
