// One decoding step of a selective state-space model, the state updated in place.
//
// Formula   step = dt + dt_bias, through softplus if asked for; for every state n of channel p of head h
//             state[n] = exp(step * A[n]) * state[n] + step * x * B[n]
//           out = (sum_n state[n] * C[n] + D * x) * silu(z). In float; the output sees the state before it is rounded.
// Threads   LANES neighbouring lanes (a power of two) have one channel, each V neighbouring states at a time (16 bytes
//           of the widest 16-bit or 32-bit state), and add their parts of the output by shuffles: a fixed order. A block
//           has THREADS / LANES channels and walks the batch with its A in registers (SINGLE: one step of the lanes covers
//           all states); everything of one sequence is read before the first use (no branches: options are definitions).
//           WHOLE: the lanes' vectors make up the states exactly. TIED (Mamba-2): A is one number a head, so one exponential a channel.
// Bytes     The state read and written; all else is small: 2 * B * H * P * N * sizeof(STATE). Floor = that / copy
//           bandwidth (H200, B256 D2048 N16 bf16: 0.008 ms); at batch 1 the launch is all there is.
//           Measured there: 0.61 of the floor; B256 H32 P64 N128 bf16 0.65.
// Lost      Options as tests at run time: each waits for its own load, 0.46 of the floor.
#include "prelude.cuh"

struct SelectiveStateUpdateParameters {
    STATE* state;
    const X* x;
    const DT* dt;
    const A_TYPE* A;
    const B_TYPE* B;
    const C_TYPE* C;
    const D_TYPE* D;  // or 0
    const Z_TYPE* z;  // or 0
    const BIAS* dt_bias;  // or 0
    const INDEX* indices;  // or 0
    X* out;
    i64 state_stride[4], x_stride[3], dt_stride[3], A_stride[3], B_stride[3], C_stride[3], D_stride[2], z_stride[3];
    i64 bias_stride[2], indices_stride, out_stride[3];
    int batch, heads, headdim, dstate;
    int heads_per_group;
};

// V elements from n on, as floats. VECTOR: contiguous and aligned, by accesses of at most 16 bytes; else one by one, 0 past
// the end.
template <class Element>
__device__ __forceinline__ void read_states(float (&to)[V], const Element* row, i64 stride, int n, int dstate) {
#if VECTOR
    constexpr int PART = V * sizeof(Element) <= 16 ? V : 16 / (int)sizeof(Element);
#pragma unroll
    for (int i = 0; i < V; i += PART) {
        float part[PART] = {};
#if !WHOLE
        if (n < dstate)  // lanes past the last state of a number that is no power of two: whole vectors, or none
#endif
            to_floats(part, load_pack<Element, PART>(row + n + i));
#pragma unroll
        for (int j = 0; j < PART; ++j) to[i + j] = part[j];
    }
#else
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = n + i < dstate ? to_float(row[(n + i) * stride]) : 0.0f;
#endif
}

__device__ __forceinline__ void write_states(STATE* row, const float (&from)[V], i64 stride, int n, int dstate) {
#if VECTOR
    Pack<STATE, V> pack;
    from_floats(pack, from);
    store_pack<STATE, V>(row + n, pack);
#else
#pragma unroll
    for (int i = 0; i < V; ++i)
        if (n + i < dstate) row[(n + i) * stride] = from_float<STATE>(from[i]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) selective_state_update(const SelectiveStateUpdateParameters p) {
    const int lane = threadIdx.x % LANES;
    const int channel = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const bool there = channel < p.heads * p.headdim;  // lanes of no channel follow the last one's, for the shuffles
    const int c = there ? channel : p.heads * p.headdim - 1;
#if ONE_HEAD
    const int h = 0, q = c, group = 0;
#else
    const int h = c / p.headdim, q = c % p.headdim, group = h / p.heads_per_group;
#endif
    const A_TYPE* A = p.A + h * p.A_stride[0] + q * p.A_stride[1];
#if HAS_D
    const float D = to_float(p.D[h * p.D_stride[0] + q * p.D_stride[1]]);
#endif
#if HAS_BIAS
    const float bias = to_float(p.dt_bias[h * p.bias_stride[0] + q * p.bias_stride[1]]);
#else
    const float bias = 0.0f;
#endif
    float a[V];
#if TIED
    a[0] = LOG2E * to_float(A[0]);
#elif SINGLE
    read_states(a, A, p.A_stride[2], lane * V, p.dstate);
#endif

    for (int b = blockIdx.y; b < p.batch; b += gridDim.y) {
        const i64 entry = p.indices ? (i64)p.indices[b * p.indices_stride] : b;
        X* out = p.out + b * p.out_stride[0] + h * p.out_stride[1] + q * p.out_stride[2];
        if (entry < 0) {  // the same for the whole block
            if (there && lane == 0) *out = from_float<X>(0.0f);
            continue;
        }
        STATE* state = p.state + entry * p.state_stride[0] + h * p.state_stride[1] + q * p.state_stride[2];
        const B_TYPE* B = p.B + b * p.B_stride[0] + group * p.B_stride[1];
        const C_TYPE* C = p.C + b * p.C_stride[0] + group * p.C_stride[1];
        const float x = to_float(p.x[b * p.x_stride[0] + h * p.x_stride[1] + q * p.x_stride[2]]);
        float step = to_float(p.dt[b * p.dt_stride[0] + h * p.dt_stride[1] + q * p.dt_stride[2]]) + bias;
#if HAS_Z
        const float z = to_float(p.z[b * p.z_stride[0] + h * p.z_stride[1] + q * p.z_stride[2]]);
#endif
        float y = 0.0f;
#if SOFTPLUS
#define STEP softplus(step)
#else
#define STEP step
#endif
#if SINGLE
        {
            const int n = lane * V;
#else
        for (int n = lane * V; n < p.dstate; n += LANES * V) {
#endif
            float s[V], of_b[V], of_c[V];
            read_states(s, state, p.state_stride[3], n, p.dstate);
            read_states(of_b, B, p.B_stride[2], n, p.dstate);
            read_states(of_c, C, p.C_stride[2], n, p.dstate);
#if !TIED && !SINGLE
            read_states(a, A, p.A_stride[2], n, p.dstate);
#endif
            const float taken = STEP, input = taken * x;
#if TIED
            const float decay = fast_exp2(taken * a[0]);
#else
            const float scaled = LOG2E * taken;
#endif
#pragma unroll
            for (int i = 0; i < V; ++i) {
#if !TIED
                const float decay = fast_exp2(scaled * a[i]);
#endif
                s[i] = __fmaf_rn(decay, s[i], input * of_b[i]);
                y = __fmaf_rn(s[i], of_c[i], y);
            }
            if (there && n < p.dstate) write_states(state, s, p.state_stride[3], n, p.dstate);
        }
        y = sum_over_lanes<LANES>(y);
        if (there && lane == 0) {
#if HAS_D
            y = __fmaf_rn(D, x, y);
#endif
#if HAS_Z
            y *= silu(z);
#endif
            *out = from_float<X>(y);
        }
    }
}
