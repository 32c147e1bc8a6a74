// Causal convolution, decoding: the next column or columns, and the state of each sequence updated in place.
//
// Formula   As the forward's, with the WIDTH - 1 columns before taken from the state; then the state is shifted left by seqlen
//           and x appended, or, with cache_seqlens, x written at cache_seqlens + t modulo state_len (a circular buffer).
//           A negative entry of conv_state_indices is padding: output 0, nothing updated.
// Threads   One for each (sequence, channel); it reads its state before it writes it, so nothing is shared. One column
//           and at most SHORT columns of state, as in decoding: all are read before the first use, one latency instead
//           of several. PACKED: such a state of four columns, the weights of width 4 and both strides allow one
//           access each instead of four.
// Bytes     x and out once, the state read and written: B * D * (2 * seqlen + 2 * state_len) * 2 for bf16. At decoding
//           sizes (0.1-8 MB) the launch is all there is: 2 us.
//           Measured (H200, bf16, D2048): 1.6 us at batch 1; 5.8 us at batch 256, 8.5 before PACKED.
#include "causal_conv1d.cuh"

#define SHORT 4

struct CausalConv1dUpdateParameters {
    const X* x;
    STATE* state;
    const W* weight;
    const BIAS* bias;  // or 0
    const LENGTH* cache_seqlens;  // or 0
    const INDEX* indices;  // or 0
    X* out;
    i64 x_stride[3], state_stride[3], weight_stride[2], bias_stride, lengths_stride, indices_stride, out_stride[3];
    int batch, dim, seqlen, state_len;
};

// In 32 bits, which hold any length of a sequence: a 64-bit division is a subroutine that spills registers.
__device__ __forceinline__ int modulo(int a, int n) {
    const int r = a % n;
    return r < 0 ? r + n : r;
}

__device__ __forceinline__ float rounded(STATE state) { return to_float(from_float<X>(to_float(state))); }  // as x's dtype

extern "C" __global__ void __launch_bounds__(256) causal_conv1d_update(const CausalConv1dUpdateParameters p) {
    const int d = blockIdx.x * blockDim.x + threadIdx.x;
    if (d >= p.dim) return;
    for (int b = blockIdx.y; b < p.batch; b += gridDim.y) {
        X* out = p.out + b * p.out_stride[0] + d * p.out_stride[1];
        const i64 entry = p.indices ? (i64)p.indices[b * p.indices_stride] : b;
        if (entry < 0) {
            for (int t = 0; t < p.seqlen; ++t) out[t * p.out_stride[2]] = X{};
            continue;
        }
        const X* x = p.x + b * p.x_stride[0] + d * p.x_stride[1];
        STATE* state = p.state + entry * p.state_stride[0] + d * p.state_stride[1];
        const int n = p.state_len;
        const int start = p.cache_seqlens ? (int)p.cache_seqlens[b * p.lengths_stride] : 0;
        float w[WIDTH], window[WIDTH];
#if PACKED
        const Pack<STATE, 4> old = load_pack<STATE, 4>(state);
        const Pack<W, 4> weights = load_pack<W, 4>(p.weight + d * p.weight_stride[0]);
        const float now = to_float(x[0]);
        float y = p.bias ? to_float(p.bias[d * p.bias_stride]) : 0.0f;
        Pack<STATE, 4> shifted;
        to_floats(w, weights);
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            shifted.at[k] = old.at[k + 1];
            y = __fmaf_rn(w[k], rounded(old.at[k + 1]), y);
        }
        shifted.at[3] = from_float<STATE>(now);
        y = __fmaf_rn(w[3], now, y);
        out[0] = from_float<X>(SILU ? silu(y) : y);
        store_pack<STATE, 4>(state, shifted);
        continue;
#endif
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) w[k] = to_float(p.weight[d * p.weight_stride[0] + k * p.weight_stride[1]]);
        const float bias = p.bias ? to_float(p.bias[d * p.bias_stride]) : 0.0f;
        if (!p.cache_seqlens && p.seqlen == 1 && n <= SHORT) {
            STATE columns[SHORT + 1];  // the last n of them are the state, then the new one
            columns[SHORT] = from_float<STATE>(to_float(x[0]));
#pragma unroll
            for (int i = 0; i < SHORT; ++i) columns[i] = state[max(i - (SHORT - n), 0) * p.state_stride[2]];
            float y = bias;
#pragma unroll
            for (int k = 0; k < BEFORE; ++k) y = __fmaf_rn(w[k], rounded(columns[SHORT - BEFORE + k]), y);
            y = __fmaf_rn(w[BEFORE], to_float(x[0]), y);
            out[0] = from_float<X>(SILU ? silu(y) : y);
#pragma unroll
            for (int i = 0; i < SHORT; ++i)
                if (i >= SHORT - n) state[(i - (SHORT - n)) * p.state_stride[2]] = columns[i + 1];
            continue;
        }
        int at = p.cache_seqlens ? modulo(start - BEFORE, n) : n - BEFORE;
#pragma unroll
        for (int k = 0; k < BEFORE; ++k) {
            window[k] = rounded(state[at * p.state_stride[2]]);
            at = at + 1 == n ? 0 : at + 1;
        }
        for (int t = 0; t < p.seqlen; ++t) {
            window[BEFORE] = to_float(x[t * p.x_stride[2]]);
            float y = bias;
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) y = __fmaf_rn(w[k], window[k], y);
#if SILU
            y = silu(y);
#endif
            out[t * p.out_stride[2]] = from_float<X>(y);
#pragma unroll
            for (int k = 0; k < BEFORE; ++k) window[k] = window[k + 1];
        }
        if (p.cache_seqlens) {
            const int kept = p.seqlen > n ? p.seqlen - n : 0;  // of a longer block only the last columns stay
            at = kept ? modulo(start + kept, n) : at;
            for (int t = kept; t < p.seqlen; ++t) {
                state[at * p.state_stride[2]] = from_float<STATE>(to_float(x[t * p.x_stride[2]]));
                at = at + 1 == n ? 0 : at + 1;
            }
        } else {
            for (int j = 0; j < n; ++j) {
                const int from = j + p.seqlen;
                state[j * p.state_stride[2]] =
                    from < n ? state[from * p.state_stride[2]] : from_float<STATE>(to_float(x[(from - n) * p.x_stride[2]]));
            }
        }
    }
}
